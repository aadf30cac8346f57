// The dropout mask of a call alone: what is drawn depends on the numbering of the scores and on
// nothing else, so it can be had without the call.
#pragma once

#include "flashattn/attention.h"

namespace flashattn {

// mask (batch, query_heads, seqlen_q, seqlen_k) float32 in host memory, any strides: 0 where
// `dropout` drops the weight and 1 / (1 - probability) where it stays, the bits that every backend
// draws for these sizes. Throws InvalidArgument, InvalidType, or Unsupported outside of host
// memory.
void dropout_mask(const TensorView& mask, const Dropout& dropout);

}  // namespace flashattn
