// Threadgroup part 2: barriers, exchanges and multiplies, with the check that the threads meeting
// in one of them came to the same line.
#include <algorithm>
#include <cstring>

#include "../checker/access.h"
#include "dispatch_state.h"
#include "threadgroup.h"

namespace metal_sim {
namespace {

constexpr int kMemDevice = 1;  // metal::mem_flags
constexpr int kMemThreadgroup = 2;

void advance(Epochs& epochs, int flags) {
  if ((flags & kMemThreadgroup) != 0) ++epochs.threadgroup;
  if ((flags & kMemDevice) != 0) ++epochs.device;
}

}  // namespace

void Threadgroup::barrier(abi::BarrierScope scope, int flags, abi::Source source) {
  if (measuring_) stop();
  if (scope == abi::BarrierScope::kThreadgroup)
    threadgroup_barrier(flags, {"threadgroup_barrier", source});
  else
    simdgroup_barrier(flags, {"simdgroup_barrier", source});
}

void Threadgroup::threadgroup_barrier(int flags, const WaitPoint& point) {
  thread_->waiting = point;
  thread_->state = ThreadState::kAtThreadgroupBarrier;
  if (arrived_ == 0) {
    first_arrival_ = point;
  } else if (!first_arrival_.same_place(point)) {
    report("barrier|" + first_arrival_.text() + point.text(),
           "divergent barrier: threads meet in " + first_arrival_.text() + " and " + point.text());
  }
  if (++arrived_ == live_) {
    std::uint32_t existing = 0;
    for (std::uint32_t i = 0; i < thread_count_; ++i) existing += threads_[i]->exists ? 1 : 0;
    if (live_ < existing)
      report("left|" + point.text(),
             "divergent barrier: some threads had left the kernel before " + point.text());
    ++dispatch_->counters.threadgroup_barriers;
    advance(epochs_, flags);
    checker_->barrier_passed(abi::BarrierScope::kThreadgroup, flags, point.source);
    release_threadgroup();
  }
  switch_to_next(false);
}

void Threadgroup::release_threadgroup() {
  arrived_ = 0;
  for (std::uint32_t i = 0; i < thread_count_; ++i) {
    if (threads_[i]->state != ThreadState::kAtThreadgroupBarrier) continue;
    threads_[i]->state = ThreadState::kReady;
    ready_.push(i);
  }
}

bool Threadgroup::arrive(Simdgroup& group, const WaitPoint& point) {
  if (measuring_) stop();
  thread_->waiting = point;
  thread_->state = ThreadState::kAtSimdgroupOperation;
  if (group.arrived == 0) {
    group.first = point;
  } else if (!group.first.same_place(point)) {
    report("simdgroup|" + group.first.text() + point.text(),
           "divergent simdgroup operation: lanes meet in " + group.first.text() + " and " +
               point.text());
  }
  return ++group.arrived == group.live;
}

void Threadgroup::release_simdgroup(std::uint32_t number) {
  simdgroups_[number].arrived = 0;
  const std::uint32_t end = std::min(number * 32 + 32, thread_count_);
  for (std::uint32_t i = number * 32; i < end; ++i) {
    if (threads_[i]->state != ThreadState::kAtSimdgroupOperation) continue;
    threads_[i]->state = ThreadState::kReady;
    ready_.push(i);
  }
}

void Threadgroup::simdgroup_barrier(int flags, const WaitPoint& point) {
  Simdgroup& group = simdgroup();
  if (arrive(group, point)) {
    ++dispatch_->counters.simdgroup_barriers;
    advance(group.epochs, flags);
    checker_->barrier_passed(abi::BarrierScope::kSimdgroup, flags, point.source);
    release_simdgroup(thread_->index / 32u);
  }
  switch_to_next(false);
}

const void* Threadgroup::exchange(const void* value, std::size_t bytes, const char* name,
                                  abi::Source source) {
  Simdgroup& group = simdgroup();
  char* slots = group.slots[group.parity].data();
  std::memcpy(slots + (thread_->index % 32u) * abi::kExchangeStride, value, bytes);
  if (arrive(group, {name, source})) {
    group.parity ^= 1;
    release_simdgroup(thread_->index / 32u);
  }
  switch_to_next(false);
  return slots;
}

void Threadgroup::multiply(float* d, const float* a, const float* b, const float* c,
                           abi::Source source) {
  Simdgroup& group = simdgroup();
  auto& [left, right, sum] = group.matrices[group.parity];
  const std::uint8_t* position = dispatch_->map.data() + (thread_->index % 32u) * 2;
  for (int e = 0; e < 2; ++e) {
    left[position[e]] = a[e];
    right[position[e]] = b[e];
    sum[position[e]] = c == nullptr ? 0.0f : c[e];
  }
  if (arrive(group, {"simdgroup_multiply", source})) {
    ++dispatch_->counters.matrix_multiplies;
    // Fused multiply-adds: a product of two floats is exact in double.
    for (std::size_t row = 0; row < 64; row += 8)
      for (std::size_t k = 0; k < 8; ++k)
        for (std::size_t column = 0; column < 8; ++column) {
          const double product = double{left[row + k]} * double{right[k * 8 + column]};
          sum[row + column] = static_cast<float>(product + double{sum[row + column]});
        }
    group.parity ^= 1;
    release_simdgroup(thread_->index / 32u);
  }
  switch_to_next(false);
  for (int e = 0; e < 2; ++e) d[e] = sum[position[e]];
}

}  // namespace metal_sim
