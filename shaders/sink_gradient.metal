// Backward: dsinks = -sum p delta with p = exp(sink - L), over the rows of every batch entry, one
// simdgroup per head. A sink has no value to multiply, so L and delta are all it takes.
#include "entries.h"
#include "tile.h"

// lse: (batch, head, row) by params' strides; delta: contiguous (batch, query_heads, table_rows);
// sinks, dsinks: (query_heads) by modifiers' strides.
template <uint heads>
[[kernel]] void sink_gradient(device const float* lse [[buffer(kBufferLse)]],
                              device const float* delta [[buffer(kBufferDelta)]],
                              device const float* sinks [[buffer(kBufferSinks)]],
                              device float* dsinks [[buffer(kBufferDsinks)]],
                              constant AttentionParams& params [[buffer(kBufferParams)]],
                              constant ModifierParams& modifiers [[buffer(kBufferModifiers)]],
                              FLASHATTN_ENTRY_ARGUMENT,
                              uint threadgroup_index [[threadgroup_position_in_grid]],
                              uint lane [[thread_index_in_simdgroup]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint task = params.first_threadgroup + threadgroup_index;
  const uint h = task * heads + simdgroup;
  if (h >= params.query_heads) return;
  const float sink = sinks[FLASHATTN_INT64(h) * modifiers.sinks_head];
  float sum = 0.0f;
  for (uint b = 0; b < params.batch; ++b) {
    const EntryRows entry = entry_rows(params, entries, b);
    device const float* head_delta = delta + table_index(params, entry, h);
    float entry_sum = 0.0f;
    for (uint i = lane; i < entry.seqlen_q; i += kSimdWidth) {
      const float row_lse = lse[query_index(params.lse, entry, h, i)];
      const float p = sink == -INFINITY ? 0.0f : exp2((sink - row_lse) * M_LOG2E_F);
      if (p != 0.0f) entry_sum -= p * head_delta[i];
    }
    sum += entry_sum;
  }
  sum = simdgroup_total(sum);
  if (lane == 0) dsinks[FLASHATTN_INT64(h) * modifiers.dsinks_head] = sum;
}
