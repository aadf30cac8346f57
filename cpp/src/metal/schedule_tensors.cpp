// The tables; see schedule_tensors.h.
#include "metal/schedule_tensors.h"

namespace flashattn::metal {

namespace {

using Params = abi::AttentionParams;

CallTensors input_tensors(AttentionInputs& in) {
  return {{.slot = abi::kBufferQuery, .view = &in.query, .rows = &Params::query},
          {.slot = abi::kBufferKey, .view = &in.key, .rows = &Params::key},
          {.slot = abi::kBufferValue, .view = &in.value, .rows = &Params::value},
          {.slot = abi::kBufferMask, .view = &in.mask, .role = TensorRole::kMask},
          {.slot = abi::kBufferAlibiSlopes, .view = &in.alibi_slopes},
          {.slot = abi::kBufferSinks, .view = &in.sinks}};
}

}  // namespace

CallTensors call_tensors(ForwardTensors& t) {
  constexpr auto kOutput = TensorRole::kOutput;
  CallTensors table = input_tensors(t.inputs);
  table.push_back({.slot = abi::kBufferOut, .view = &t.out, .role = kOutput, .rows = &Params::out});
  table.push_back(
      {.slot = abi::kBufferLse, .view = &t.lse, .role = kOutput, .scalars = &Params::lse});
  return table;
}

CallTensors call_tensors(BackwardTensors& t) {
  constexpr auto kOutput = TensorRole::kOutput;
  CallTensors table = input_tensors(t.inputs);
  for (const CallTensor& more : std::initializer_list<CallTensor>{
           {.slot = abi::kBufferOut, .view = &t.out, .rows = &Params::out},
           {.slot = abi::kBufferLse, .view = &t.lse, .scalars = &Params::lse},
           {.slot = abi::kBufferDout, .view = &t.dout, .rows = &Params::dout},
           {.slot = abi::kBufferDlse, .view = &t.dlse, .scalars = &Params::dlse},
           {.slot = abi::kBufferDq, .view = &t.dq, .role = kOutput, .rows = &Params::dq},
           {.slot = abi::kBufferDk, .view = &t.dk, .role = kOutput, .rows = &Params::dk},
           {.slot = abi::kBufferDv, .view = &t.dv, .role = kOutput, .rows = &Params::dv},
           {.slot = abi::kBufferDmask, .view = &t.dmask, .role = kOutput},
           {.slot = abi::kBufferDalibiSlopes, .view = &t.dalibi_slopes, .role = kOutput},
           {.slot = abi::kBufferDsinks, .view = &t.dsinks, .role = kOutput}}) {
    table.push_back(more);
  }
  return table;
}

void set_strides(const CallTensors& table, abi::AttentionParams* params) {
  for (const CallTensor& tensor : table) {
    if (!*tensor.view) continue;
    const auto& stride = tensor.view->stride;
    if (tensor.rows != nullptr) {
      params->*tensor.rows = {
          .batch = stride[0], .row = stride[1], .head = stride[2], .dim = stride[3]};
    }
    if (tensor.scalars != nullptr) {
      params->*tensor.scalars = {.batch = stride[0], .head = stride[1], .row = stride[2]};
    }
  }
}

}  // namespace flashattn::metal
