// The tensors of a call in one table: each is spelled once, with the slot that kernels find it in,
// what becomes of it on its way to the GPU, and where its strides stand in the parameters.
#pragma once

#include "flashattn/attention.h"
#include "metal/fixed_vector.h"
#include "shaders/abi.h"

namespace flashattn::metal {

enum class TensorRole : std::uint8_t {
  kInput,
  kMask,  // an input of which one copy serves along an axis it is broadcast over
  kOutput,
};

struct CallTensor {
  abi::BufferSlot slot = abi::kBufferQuery;
  TensorView* view = nullptr;  // rank 0: the call does not have it
  TensorRole role = TensorRole::kInput;
  // Where its strides go; null for the tensors whose strides are options' (schedule_options.h).
  abi::TensorStrides abi::AttentionParams::* rows = nullptr;
  abi::ScalarStrides abi::AttentionParams::* scalars = nullptr;
};

// All that a call may have: six inputs, and backward ten more.
using CallTensors = FixedVector<CallTensor, 16>;

// The table over a call's own structs, whose views a binder replaces with what kernels see.
CallTensors call_tensors(ForwardTensors& tensors);
CallTensors call_tensors(BackwardTensors& tensors);

// Writes the strides of every tensor of the table that is there.
void set_strides(const CallTensors& table, abi::AttentionParams* params);

}  // namespace flashattn::metal
