// From bound tensors to results; see run_call.h.
#include "metal/run_call.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/pending.h"
#include "flashattn/error.h"
#include "metal/mask_table.h"
#include "metal/stream.h"

namespace flashattn::metal {

namespace {

Schedule schedule_of(const BoundPass& pass, const KernelChoice& choice, Call* call) {
  Schedule reused = std::move(call->schedule);
  if (pass.forward != nullptr) {
    return schedule_forward(pass.problem, *pass.forward, call->visible, choice, std::move(reused));
  }
  return schedule_backward(pass.problem, *pass.backward, call->visible, choice, std::move(reused));
}

template <typename Item>
BoundBuffer table_of(const std::vector<Item>& items, CallBuffers* buffers) {
  return buffers->table(items.data(), items.size() * sizeof(Item));
}

// Binds the tables and the scratch memory of the schedule.
void bind_tables(const BoundPass& pass, Call* call) {
  const Schedule& schedule = call->schedule;
  CallBuffers* const buffers = &call->buffers;
  SlotTable& slots = call->slots;
  slots[abi::kBufferRowIntervals] = table_of(schedule.row_intervals, buffers);
  if (!schedule.entries.empty()) {
    slots[abi::kBufferEntries] = table_of(schedule.entries, buffers);
  }
  if (!schedule.block_table.empty()) {
    slots[abi::kBufferBlockTable] = table_of(schedule.block_table, buffers);
  }
  if (pass.problem.alibi) slots[abi::kBufferRowShifts] = table_of(schedule.row_shifts, buffers);
  if (const TensorView& mask = pass.mask()) {
    settle_before_reading(mask);
    // Tiles of a mask that the host cannot see all count as mixed.
    const TensorView seen = host_sees(mask) ? host_view(mask) : mask;
    call->mask_tiles = mask_table(pass.problem, seen, std::move(call->mask_tiles));
    slots[abi::kBufferMaskTiles] = table_of(call->mask_tiles, buffers);
  }
  for (const Scratch& scratch : schedule.scratch) {
    slots[scratch.slot] = buffers->scratch(static_cast<std::size_t>(scratch.bytes));
  }
  // A kernel of the key side names both gradients, also where only one is wanted and written.
  BoundBuffer& dk = slots[abi::kBufferDk];
  BoundBuffer& dv = slots[abi::kBufferDv];
  if (dk.buffer == nullptr) dk = dv;
  if (dv.buffer == nullptr) dv = dk;
  constexpr std::uint32_t kGood = abi::kStatusGood;
  slots[abi::kBufferStatus] =
      has_status(schedule) ? buffers->table(&kGood, sizeof kGood) : BoundBuffer{};
}

// Whether every kernel that looks at the lane map has been seen to like it.
bool is_proven(const Call& call) {
  const int now = lane_map_generation();
  return std::all_of(call.kernels.begin(), call.kernels.end(),
                     [now](const CompiledKernel* kernel) { return kernel->proven == now; });
}

void prove(const Call& call, int generation) {
  for (const CompiledKernel* kernel : call.kernels) kernel->proven = generation;
}

// Commits the call; false if a register kernel was refused, and a weaker one is to be chosen.
bool commit(Session* here, DType dtype, WorkOrder* order, Call* call) {
  const LaneMap map = call->facts.map_of(dtype);
  try {
    here->pipelines.get_all(call->schedule.dispatches, &call->kernels);
  } catch (const KernelRefused& refused) {
    here->lane_maps.demote(dtype, map, refused.what());
    return false;
  }
  call->submission.commit(
      here->device,
      {.schedule = call->schedule, .kernels = call->kernels, .slots = call->slots, .order = order});
  return true;
}

}  // namespace

std::uint32_t status_of(const Call& call) {
  std::uint32_t status = abi::kStatusGood;
  const BoundBuffer& bound = call.slots[abi::kBufferStatus];
  if (bound.contents != nullptr) std::memcpy(&status, bound.contents, sizeof status);
  return status;
}

// A status tells that the results are void and what would make them good: other kernels for the
// device's lane map, or kernels that select. A register kernel that the device refuses is found
// before anything runs, and makes way for a weaker one.
void run_call(Session* here, const BoundPass& pass, CallPool::Lease call) {
  Stream* const stream = Stream::current();
  const DType dtype = pass.problem.dtype;
  bool selects = stream != nullptr;
  for (;;) {
    const int generation = lane_map_generation();
    call->facts = here->facts(std::move(call->facts));
    call->schedule = schedule_of(pass, {.facts = call->facts, .selects = selects}, call.get());
    bind_tables(pass, call.get());
    if (!commit(here, dtype, stream == nullptr ? nullptr : stream->order(), call.get())) continue;
    if (stream != nullptr && is_proven(*call) && !call->buffers.has_staged_outputs()) {
      stream->push(std::move(call));
      return;
    }
    const std::string failure = call->submission.wait(call->schedule);
    if (!failure.empty()) throw DeviceError(failure);
    const std::uint32_t status = status_of(*call);
    if (status == abi::kStatusGood) {
      prove(*call, generation);
      break;
    }
    if (status == abi::kStatusLaneMap) {
      here->lane_maps.demote(dtype, call->facts.map_of(dtype),
                             "a kernel met another map than was probed");
    }
    if (status == abi::kStatusNonFinite) selects = true;
  }
  call->buffers.finish();
}

}  // namespace flashattn::metal
