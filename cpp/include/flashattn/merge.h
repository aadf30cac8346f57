// Merging attention results over disjoint sets of keys into the result over their union: what
// split-KV decoding, ring attention and shared prefixes end with.
#pragma once

#include <vector>

#include "flashattn/error.h"
#include "flashattn/tensor.h"

namespace flashattn {

// Parts and their union, in host memory. All outs have one shape and dtype (float32, float16 or
// bfloat16), all lses are float32; out may have another of the three dtypes.
struct MergeTensors {
  std::vector<TensorView> outs;  // each (batch, seqlen_q, heads, dim); at least one
  std::vector<TensorView> lses;  // each (batch, heads, seqlen_q), natural log
  TensorView out{};              // (batch, seqlen_q, heads, dim)
  TensorView lse{};              // (batch, heads, seqlen_q)
};

// Gradients of the union, and of the parts; a part's view may be empty if nobody wants it.
struct MergeGradients {
  TensorView dout{};  // in outs' dtype
  TensorView dlse{};  // optional
  std::vector<TensorView> douts;
  std::vector<TensorView> dlses;
};

// out = sum_p exp(lse_p - lse) out_p and lse = log sum_p exp(lse_p), in float32. A part with lse
// -inf saw no key and contributes nothing, whatever its out holds; where all are -inf, out is 0 and
// lse -inf. Throws InvalidArgument, InvalidType, or Unsupported outside of host memory.
void merge_attention(const MergeTensors& tensors);

// Writes the gradients of the parts. `tensors.out` and `tensors.lse` are not read.
void merge_attention_backward(const MergeTensors& tensors, const MergeGradients& gradients);

}  // namespace flashattn
