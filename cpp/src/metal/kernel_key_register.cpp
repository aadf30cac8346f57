// Names, template arguments, constants and sizes of register kernels; see kernel_key.h. They mirror
// the templates of shaders/register_*.metal.
#include "metal/kernel_key.h"

namespace flashattn::metal {

namespace {

constexpr int kFragment = abi::kFragment;

bool has_half_factors(const KernelKey& key) { return key.dtype == DType::kFloat16; }

bool is_key_side(KernelKind kind) {
  return kind == KernelKind::kBackwardDv || kind == KernelKind::kBackwardDk ||
         kind == KernelKind::kBackwardDkv;
}

std::string fragments_held(int tile, bool held) {
  return std::to_string(held ? tile / kFragment : 1);
}

}  // namespace

std::string register_file(KernelKind kind) {
  if (kind == KernelKind::kForward) return "register_forward";
  if (kind == KernelKind::kBackwardDq) return "register_dq";
  return is_key_side(kind) ? "register_dkv" : "";
}

std::string register_suffix(const KernelKey& key) {
  const RegisterVariant& variant = key.registers;
  std::string text = "_s" + std::to_string(variant.simdgroups);
  if (!variant.held) text += "_read";
  if (key.kind != KernelKind::kForward && !variant.value_held) text += "_read_value";
  return text + (variant.apple_map ? "_apple" : "_any");
}

std::string register_arguments(const KernelKey& key) {
  const RegisterVariant& variant = key.registers;
  std::string text = has_half_factors(key) ? "half" : "float";
  for (const int size : {key.head_tile, key.value_tile, variant.row_fragments, key.block_columns,
                         variant.simdgroups}) {
    text += ", " + std::to_string(size);
  }
  text += ", " + fragments_held(key.head_tile, variant.held);
  if (key.kind != KernelKind::kForward) {
    text += ", " + fragments_held(key.value_tile, variant.value_held);
  }
  if (is_key_side(key.kind)) {
    text += key.kind == KernelKind::kBackwardDk ? ", false" : ", true";
    text += key.kind == KernelKind::kBackwardDv ? ", false" : ", true";
  }
  return text + (variant.apple_map ? ", kExchangeApple" : ", kExchangeAny");
}

std::vector<FunctionConstantValue> register_constants(const KernelKey& key) {
  const RegisterVariant& variant = key.registers;
  std::vector<FunctionConstantValue> values = {{abi::kConstantFullRows, variant.full_rows},
                                               {abi::kConstantVectorRows, variant.vector_rows},
                                               {abi::kConstantExactTiles, variant.exact_tiles},
                                               {abi::kConstantSelects, variant.selects}};
  if (key.kind == KernelKind::kForward) values.push_back({abi::kConstantIsSplit, variant.split});
  return values;
}

std::string register_constants_text(const KernelKey& key) {
  const RegisterVariant& variant = key.registers;
  std::string text;
  if (variant.full_rows) text += "+full";
  if (variant.vector_rows) text += "+vectors";
  if (variant.exact_tiles) text += "+exact";
  if (variant.split) text += "+split";
  if (variant.selects) text += "+selects";
  return text;
}

std::int64_t register_memory(const KernelKey& key) {
  const int element = has_half_factors(key) ? 2 : 4;  // bytes
  constexpr int kRowPadding = 16;                     // bytes
  const int rows = (key.head_tile + key.value_tile) * element + 2 * kRowPadding;
  std::int64_t bytes = std::int64_t{key.block_columns} * rows;
  const int simdgroups = key.registers.simdgroups;
  bytes += 4 * simdgroups;                                          // flags
  if (key.kind == KernelKind::kForward) bytes += 256 * simdgroups;  // tables of the exchange
  if (is_key_side(key.kind)) bytes += 4 * simdgroups + 8 * key.block_columns;  // dead, columns
  constexpr std::int64_t kGranule = 16;  // bytes, in which Metal counts threadgroup memory
  return (bytes + kGranule - 1) / kGranule * kGranule;
}

}  // namespace flashattn::metal
