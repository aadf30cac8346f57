// Calls that are used again; see call.h.
#include "metal/call.h"

#include <utility>

#include "metal/strided_copy.h"

namespace flashattn::metal {

namespace {

// Bytes of lists that a call keeps: those of a block table can be as long as a cache.
constexpr std::size_t kMostKept = std::size_t{1} << 18;

template <typename Item>
std::size_t bytes_of(const std::vector<Item>& list) {
  return list.capacity() * sizeof(Item);
}

}  // namespace

UsedMemory used_memory(const TensorView& view, bool written) {
  if (!view || !host_sees(view)) return {};
  const ByteRange range = touched_bytes(view);
  const auto start = reinterpret_cast<std::uintptr_t>(host_view(view).data);
  return {.begin = start - range.before, .end = start + range.after, .written = written};
}

void Call::clear() {
  submission.end();
  buffers.clear();
  slots = {};
  facts.tuning.reset();
  used = {};
}

bool Call::is_small() const {
  return bytes_of(visible) + bytes_of(mask_tiles) + bytes_of(schedule.dispatches) +
             bytes_of(schedule.row_intervals) + bytes_of(schedule.row_shifts) +
             bytes_of(schedule.entries) + bytes_of(schedule.block_table) <=
         kMostKept;
}

CallPool::Lease CallPool::take() {
  std::unique_ptr<Call> call;
  {
    const std::lock_guard lock(mutex_);
    if (idle_.capacity() == 0) idle_.reserve(kMostIdle);  // so that giving back allocates nothing
    if (!idle_.empty()) {
      call = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!call) call = std::make_unique<Call>(source_);
  return {call.release(), {this}};
}

void CallPool::GiveBack::operator()(Call* given) const noexcept {
  std::unique_ptr<Call> call(given);
  call->clear();
  if (!call->is_small()) return;
  const std::lock_guard lock(pool->mutex_);
  if (pool->idle_.size() < kMostIdle) pool->idle_.push_back(std::move(call));
}

}  // namespace flashattn::metal
