// What a kernel's options mean to Metal: function constants, bindings, and their names; see
// kernel_key.h. Both lists mirror the kernels' declarations in shaders/: the device refuses a
// dispatch without a buffer that a kernel uses, and a pipeline without a constant.
#include "metal/kernel_key.h"

namespace flashattn::metal {

namespace {

bool is_backward_product(KernelKind kind) {
  return kind == KernelKind::kBackwardDq || kind == KernelKind::kBackwardDv ||
         kind == KernelKind::kBackwardDk || kind == KernelKind::kBackwardDkv;
}

// Whether the kernel includes modifiers.h.
bool has_options(KernelKind kind) {
  return kind == KernelKind::kForward || kind == KernelKind::kMergeChunks ||
         kind == KernelKind::kMaskGradient || is_backward_product(kind);
}

// One template has all register kernels of the key side, and so their buffers.
KernelKind kind_of_buffers(const KernelKey& key) {
  const bool key_side = key.kind == KernelKind::kBackwardDv || key.kind == KernelKind::kBackwardDk;
  return key.registers && key_side ? KernelKind::kBackwardDkv : key.kind;
}

Bindings plain_bindings(const KernelKey& key) {
  using namespace abi;
  switch (kind_of_buffers(key)) {
    case KernelKind::kForward:
      return {{kBufferQuery},     {kBufferKey},       {kBufferValue},
              {kBufferOut, true}, {kBufferLse, true}, {kBufferRowIntervals}};
    case KernelKind::kMergeChunks:
      return {{kBufferOut, true}, {kBufferLse, true}, {kBufferPartialOut}, {kBufferPartialState}};
    case KernelKind::kDelta:
      return {{kBufferOut}, {kBufferDout}, {kBufferDelta, true}};
    case KernelKind::kBackwardDq:
      return {{kBufferQuery}, {kBufferKey},   {kBufferValue},    {kBufferLse},
              {kBufferDout},  {kBufferDelta}, {kBufferDq, true}, {kBufferRowIntervals}};
    case KernelKind::kBackwardDv:
      return {{kBufferQuery}, {kBufferKey},      {kBufferLse},
              {kBufferDout},  {kBufferDv, true}, {kBufferRowIntervals}};
    case KernelKind::kBackwardDk:
      return {{kBufferQuery}, {kBufferKey},   {kBufferValue},    {kBufferLse},
              {kBufferDout},  {kBufferDelta}, {kBufferDk, true}, {kBufferRowIntervals}};
    case KernelKind::kBackwardDkv:
      return {{kBufferQuery},    {kBufferKey},      {kBufferValue},
              {kBufferLse},      {kBufferDout},     {kBufferDelta},
              {kBufferDk, true}, {kBufferDv, true}, {kBufferRowIntervals}};
    case KernelKind::kMaskGradient:
      return {{kBufferQuery}, {kBufferKey},   {kBufferValue},       {kBufferLse},
              {kBufferDout},  {kBufferDelta}, {kBufferDmask, true}, {kBufferRowIntervals}};
    case KernelKind::kSlopeGradient:
      return {{kBufferSlopeRows}, {kBufferDalibiSlopes, true}};
    case KernelKind::kSinkGradient:
      return {{kBufferLse}, {kBufferDelta}, {kBufferSinks}, {kBufferDsinks, true}};
    case KernelKind::kLaneMapProbe:
      return {{kBufferOut, true}};
  }
  return {};
}

}  // namespace

std::vector<FunctionConstantValue> function_constants(const KernelKey& key) {
  if (key.kind == KernelKind::kDelta) {
    return {{abi::kConstantHasDlse, key.has_dlse}, {abi::kConstantIsRagged, key.ragged}};
  }
  if (key.kind == KernelKind::kLaneMapProbe) return {};
  if (!has_options(key.kind)) return {{abi::kConstantIsRagged, key.ragged}};
  const KernelOptions& options = key.options;
  std::vector<FunctionConstantValue> values = {
      {abi::kConstantHasModifiers, options.any()},
      {abi::kConstantHasSoftcap, options.softcap},
      {abi::kConstantHasAlibi, options.alibi},
      {abi::kConstantHasMask, options.mask.has_value()},
      {abi::kConstantMaskIsBool, options.mask == DType::kBool},
      {abi::kConstantMaskIsHalf, options.mask == DType::kFloat16},
      {abi::kConstantMaskIsBfloat, options.mask == DType::kBFloat16},
      {abi::kConstantHasSinks, options.sinks},
      {abi::kConstantHasDropout, options.dropout}};
  // A mask's gradient is that of a dense mask, which ragged sequences cannot have.
  if (key.kind != KernelKind::kMaskGradient) {
    values.push_back({abi::kConstantIsRagged, key.ragged});
  }
  if (key.kind == KernelKind::kForward) values.push_back({abi::kConstantIsPaged, key.paged});
  if (is_backward_product(key.kind)) values.push_back({abi::kConstantAccumulate, key.accumulate});
  if (key.kind == KernelKind::kBackwardDq) {
    values.push_back({abi::kConstantSlopeGradient, options.slope_gradient});
  }
  if (key.registers) {
    for (const FunctionConstantValue& value : register_constants(key)) values.push_back(value);
  }
  return values;
}

Bindings bindings(const KernelKey& key) {
  Bindings used = plain_bindings(key);
  const auto add = [&used](bool on, std::initializer_list<Binding> more) {
    if (!on) return;
    for (const Binding& binding : more) used.push_back(binding);
  };
  add(key.ragged, {{abi::kBufferEntries}});
  // It has to know of the options only in which units scores are.
  if (key.kind == KernelKind::kMergeChunks) return used;
  add(key.has_dlse, {{abi::kBufferDlse}});
  add(static_cast<bool>(key.registers), {{abi::kBufferStatus, true}});
  add(key.options.mask.has_value(), {{abi::kBufferMask}, {abi::kBufferMaskTiles}});
  add(key.options.alibi, {{abi::kBufferAlibiSlopes}, {abi::kBufferRowShifts}});
  add(key.options.sinks, {{abi::kBufferSinks}});
  add(key.options.slope_gradient, {{abi::kBufferSlopeRows, true}});
  add(key.registers.split, {{abi::kBufferPartialOut, true}, {abi::kBufferPartialState, true}});
  add(key.paged, {{abi::kBufferBlockTable}});
  return used;
}

bool takes_modifiers(const KernelKey& key) {
  if (key.kind == KernelKind::kMergeChunks) return false;
  return key.options.any() || key.kind == KernelKind::kSlopeGradient ||
         key.kind == KernelKind::kSinkGradient;
}

std::string to_string(const KernelKey& key) {
  std::string text = function_name(key);
  const auto add = [&text](bool on, const std::string& name) {
    if (on) text += "+" + name;
  };
  add(key.accumulate, "accumulate");
  add(key.has_dlse, "dlse");
  add(key.ragged, "ragged");
  add(key.paged, "paged");
  add(key.options.softcap, "softcap");
  add(key.options.alibi, "alibi");
  if (key.options.mask) add(true, std::string(dtype_name(*key.options.mask)) + "_mask");
  add(key.options.sinks, "sinks");
  add(key.options.dropout, "dropout");
  add(key.options.slope_gradient, "slope_rows");
  if (key.registers) text += register_constants_text(key);
  return text;
}

}  // namespace flashattn::metal
