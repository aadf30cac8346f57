// Backward: dalibi_slopes, one simdgroup per slope: the sum of what dq wrote for each row, over the
// batch too where all entries share the slopes.
#include "entries.h"
#include "tile.h"

// slope_rows: contiguous (batch, query_heads, table_rows); dalibi_slopes: (query_heads) or (batch,
// query_heads) by modifiers' strides.
template <uint heads>
[[kernel]] void slope_gradient(device const float* slope_rows [[buffer(kBufferSlopeRows)]],
                               device float* dalibi_slopes [[buffer(kBufferDalibiSlopes)]],
                               constant AttentionParams& params [[buffer(kBufferParams)]],
                               constant ModifierParams& modifiers [[buffer(kBufferModifiers)]],
                               FLASHATTN_ENTRY_ARGUMENT,
                               uint threadgroup_index [[threadgroup_position_in_grid]],
                               uint lane [[thread_index_in_simdgroup]],
                               uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint task = params.first_threadgroup + threadgroup_index;
  const uint slope = task * heads + simdgroup;
  const uint h = slope % params.query_heads;
  const uint first = slope / params.query_heads;
  const uint last = modifiers.slopes_per_batch != 0 ? first + 1 : params.batch;
  const uint slopes = modifiers.slopes_per_batch != 0 ? params.batch : 1u;
  if (first >= slopes) return;
  float sum = 0.0f;
  for (uint b = first; b < last; ++b) {
    const EntryRows entry = entry_rows(params, entries, b);
    device const float* rows = slope_rows + table_index(params, entry, h);
    float entry_sum = 0.0f;
    for (uint i = lane; i < entry.seqlen_q; i += kSimdWidth) entry_sum += rows[i];
    sum += entry_sum;
  }
  sum = simdgroup_total(sum);
  if (lane == 0) {
    dalibi_slopes[FLASHATTN_INT64(first) * modifiers.dslopes_batch +
                  FLASHATTN_INT64(h) * modifiers.dslopes_head] = sum;
  }
}
