// Which register kernel a product runs with; see tuning.h. Its sizes are tuning_table.h's choice.
#include <algorithm>

#include "metal/tuning.h"
#include "metal/tuning_table.h"

namespace flashattn::metal {

namespace {

constexpr int kFragment = abi::kFragment;

// The key with its rows, if the device has the memory and the threads.
std::optional<KernelKey> fitting(KernelKey key, const DeviceFacts& facts) {
  key.block_rows = kFragment * key.registers.row_fragments * key.registers.simdgroups;
  if (register_memory(key) > facts.max_threadgroup_memory ||
      threads_per_threadgroup(key) > facts.max_threads_per_threadgroup) {
    return std::nullopt;
  }
  return key;
}

}  // namespace

bool fuses_dkv(int head_tile, int value_tile) { return std::max(head_tile, value_tile) <= 64; }

std::optional<KernelKey> choose_register(KernelKey key, std::int64_t rows,
                                         const DeviceFacts& facts) {
  const LaneMap map = facts.map_of(key.dtype);
  const int tile = std::max(key.head_tile, key.value_tile);
  if (map == LaneMap::kUnknown) return std::nullopt;
  // The fused kernel needs more registers with Apple's map written out than with the map it learns.
  const bool apple = map == LaneMap::kApple && key.kind != KernelKind::kBackwardDkv;
  const TuningSlot slot{
      .kind = key.kind, .dtype = key.dtype, .width = width_of(tile), .apple = apple};
  const TuningChoice shape = facts.tuning ? facts.tuning->choice(slot) : shipped_choice(slot);
  if (!shape) return std::nullopt;
  key.block_columns = shape->columns;
  key.registers = {.row_fragments = shape->row_fragments,
                   .simdgroups = shape->simdgroups,
                   .held = shape->held,
                   .value_held = shape->value_held,
                   .apple_map = apple,
                   .full_rows = true};
  // Few rows: no threads for rows that do not exist. Neither changes a row's bits.
  RegisterVariant& variant = key.registers;
  if (rows <= kFragment) variant.row_fragments = 1;
  // In one step, so that few kernels are compiled.
  const int fewer = variant.simdgroups / 4;
  if (fewer * variant.row_fragments * kFragment >= rows) variant.simdgroups = fewer;
  return fitting(key, facts);
}

std::optional<KernelKey> choose_split(KernelKey key, std::int64_t heads_per_kv,
                                      const DeviceFacts& facts) {
  std::optional<KernelKey> chosen = choose_register(key, 1, facts);
  if (!chosen) return chosen;
  RegisterVariant& variant = chosen->registers;
  // Q takes registers that rows of the widest tiles have not.
  const int tile = std::max(key.head_tile, key.value_tile);
  if (width_of(tile) != kWidths.back()) variant.held = true;
  variant.full_rows = false;
  variant.split = true;
  // Two sizes, so that few kernels are compiled.
  variant.simdgroups = heads_per_kv == 1 ? 1 : 4;
  return fitting(*chosen, facts);
}

}  // namespace flashattn::metal
