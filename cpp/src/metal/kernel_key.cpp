// Names, instantiation lines and sizes of kernels; see kernel_key.h. The sizes mirror the
// declarations at the top of each kernel in shaders/, and the simulated device's tests hold them
// against the compiled kernels.
#include "metal/kernel_key.h"

#include <algorithm>

namespace flashattn::metal {

namespace {

constexpr int kSimdWidth = abi::kSimdWidth;
constexpr int kFragment = abi::kFragment;
constexpr int kPadding = abi::kPadding;

std::string storage_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "half";
    case DType::kBFloat16:
      return "Bfloat16";
    default:
      return "float";
  }
}

std::string function_template(const KernelKey& key) {
  return key.kind == KernelKind::kDelta ? "delta_rows" : shader_file(key);
}

// Kernels without tiles: a row or a head to each simdgroup.
bool is_row_kernel(KernelKind kind) {
  return kind == KernelKind::kDelta || kind == KernelKind::kMergeChunks ||
         kind == KernelKind::kSlopeGradient || kind == KernelKind::kSinkGradient ||
         kind == KernelKind::kLaneMapProbe;
}

// Those read and write float tables alone, so there is one of each.
bool is_sum(KernelKind kind) {
  return kind == KernelKind::kSlopeGradient || kind == KernelKind::kSinkGradient;
}

std::string staged_file(KernelKind kind) {
  switch (kind) {
    case KernelKind::kForward:
      return "forward";
    case KernelKind::kMergeChunks:
      return "merge_chunks";
    case KernelKind::kDelta:
      return "delta";
    case KernelKind::kBackwardDq:
      return "backward_dq";
    case KernelKind::kBackwardDv:
      return "backward_dv";
    case KernelKind::kBackwardDk:
      return "backward_dk";
    case KernelKind::kBackwardDkv:
      return "backward_dkv";
    case KernelKind::kMaskGradient:
      return "mask_gradient";
    case KernelKind::kSlopeGradient:
      return "slope_gradient";
    case KernelKind::kSinkGradient:
      return "sink_gradient";
    case KernelKind::kLaneMapProbe:
      return "lane_map_probe";
  }
  return "?";
}

}  // namespace

std::string shader_file(const KernelKey& key) {
  return key.registers ? register_file(key.kind) : staged_file(key.kind);
}

std::string function_name(const KernelKey& key) {
  std::string name = (key.registers ? "register_" : "") + staged_file(key.kind);
  if (!is_sum(key.kind)) name += "_" + std::string(dtype_name(key.dtype));
  if (key.head_tile != 0) name += "_d" + std::to_string(key.head_tile);
  if (key.value_tile != 0) name += "_v" + std::to_string(key.value_tile);
  name += "_r" + std::to_string(key.block_rows);
  if (key.block_columns != 0) name += "_c" + std::to_string(key.block_columns);
  if (key.registers) name += register_suffix(key);
  return name;
}

std::string instantiation(const KernelKey& key) {
  std::string text =
      "FLASHATTN_INSTANTIATE(\"" + function_name(key) + "\", " + function_template(key);
  if (!is_sum(key.kind)) text += ", " + storage_type(key.dtype);
  if (key.registers) return text + ", " + register_arguments(key) + ")";
  if (key.kind == KernelKind::kLaneMapProbe) return text + ")";
  for (const int size : {key.head_tile, key.value_tile, key.block_rows, key.block_columns}) {
    if (size != 0) text += ", " + std::to_string(size);
  }
  return text + ")";
}

int threads_per_threadgroup(const KernelKey& key) {
  if (key.registers) return key.registers.simdgroups * kSimdWidth;
  const int rows_of_simdgroup = is_row_kernel(key.kind) ? 1 : kFragment;
  return key.block_rows / rows_of_simdgroup * kSimdWidth;
}

std::int64_t threadgroup_memory(const KernelKey& key) {
  if (key.kind == KernelKind::kLaneMapProbe) {
    return abi::kFragmentSize * static_cast<std::int64_t>(item_size(key.dtype));
  }
  if (is_row_kernel(key.kind)) return 0;
  if (key.registers) return register_memory(key);
  const int strips = key.block_rows / kFragment;
  const int tiles = key.block_columns * (key.head_tile + key.value_tile + 2 * kPadding);
  const int arena =
      std::max({tiles, key.block_rows * key.head_tile, key.block_rows * key.value_tile});
  const int scores = key.block_rows * (key.block_columns + kPadding);
  const bool one_score_tile =
      key.kind == KernelKind::kForward || key.kind == KernelKind::kBackwardDv;
  int floats = arena + scores * (one_score_tile ? 1 : 2);
  if (key.kind != KernelKind::kMaskGradient) {
    floats += strips * kFragment * kFragment + key.block_rows + strips;  // scratch, visible,
  }  // non_finite
  if (key.kind == KernelKind::kBackwardDv) floats += key.block_columns;
  if (key.kind == KernelKind::kBackwardDk) floats += 2 * key.block_columns;
  constexpr std::int64_t kGranule = 16;  // bytes, in which Metal counts threadgroup memory
  return (std::int64_t{4} * floats + kGranule - 1) / kGranule * kGranule;
}

std::size_t KernelKeyHash::operator()(const KernelKey& key) const {
  std::uint64_t hash = 0;
  const auto add = [&hash](auto value) {
    constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15U;  // 2^64 over the golden ratio
    hash = (hash ^ static_cast<std::uint64_t>(value)) * kOdd;
    hash ^= hash >> 32;
  };
  const KernelOptions& options = key.options;
  const RegisterVariant& variant = key.registers;
  add(key.kind);
  add(key.dtype);
  for (const int size : {key.head_tile, key.value_tile, key.block_rows, key.block_columns,
                         variant.row_fragments, variant.simdgroups}) {
    add(size);
  }
  add(options.mask ? static_cast<int>(*options.mask) + 1 : 0);
  for (const bool flag :
       {key.accumulate, key.has_dlse, key.ragged, key.paged, options.softcap, options.alibi,
        options.sinks, options.dropout, options.slope_gradient, variant.held, variant.value_held,
        variant.apple_map, variant.full_rows, variant.vector_rows, variant.exact_tiles,
        variant.split, variant.selects}) {
    add(flag);
  }
  return static_cast<std::size_t>(hash);
}

}  // namespace flashattn::metal
