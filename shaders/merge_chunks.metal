// Forward, few rows: what the chunks of a row's keys came to, one simdgroup per query row, in
// ascending order whatever ran first.
//
//   m = max over chunks with weights;  w_c = exp2(c (m_c - m))
//   l = sum w_c l_c;  out = sum w_c O_c / l;  L = scale m + log l
// c, m and O are register_forward.metal's, in its units. A chunk that showed a row nothing has l_c
// = 0 and is left out: one chunk alone gives the bits of a call that is not split.
#include "entries.h"
#include "score_units.h"
#include "tile.h"

// out: (batch, row, head, dim) by params' strides; lse: (batch, head, row); partial_out,
// partial_state: as register_forward.metal has them. rows: at least params.few_rows.
template <typename T, uint rows>
[[kernel]] void merge_chunks(device T* out [[buffer(kBufferOut)]],
                             device float* lse [[buffer(kBufferLse)]],
                             device const float* partial_out [[buffer(kBufferPartialOut)]],
                             device const float* partial_state [[buffer(kBufferPartialState)]],
                             FLASHATTN_ENTRY_ARGUMENT,
                             constant AttentionParams& params [[buffer(kBufferParams)]],
                             uint threadgroup_index [[threadgroup_position_in_grid]],
                             uint lane [[thread_index_in_simdgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint task = params.first_threadgroup + threadgroup_index;
  const uint b = task / params.query_heads;
  const uint h = task % params.query_heads;
  const EntryRows entry = entry_rows(params, entries, b);
  if (simdgroup >= entry.seqlen_q || entry.seqlen_q > params.few_rows) return;
  const FLASHATTN_INT64 part = partial_index(params, b, h, simdgroup);
  device const float* states = partial_state + 2 * part;
  device const float* parts = partial_out + part * params.value_dim;

  const ScoreUnits units = score_units(params.scale, params.scale_log2e);
  float row_max = -FLT_MAX;
  for (uint c = 0; c < params.chunks; ++c) {
    if (states[2 * c + 1] != 0.0f) row_max = max(row_max, states[2 * c]);
  }
  float row_sum = 0.0f;
  for (uint c = 0; c < params.chunks; ++c) {
    const float sum = states[2 * c + 1];
    if (sum != 0.0f) row_sum += sum * fast::exp2((states[2 * c] - row_max) * units.factor);
  }
  const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
  device T* out_row = query_pointer(out, params.out, entry, h, simdgroup);
  for (uint d = lane; d < params.value_dim; d += kSimdWidth) {
    float total = 0.0f;
    for (uint c = 0; c < params.chunks; ++c) {
      if (states[2 * c + 1] == 0.0f) continue;
      total += parts[FLASHATTN_INT64(c) * params.value_dim + d] *
               fast::exp2((states[2 * c] - row_max) * units.factor);
    }
    store_float(out_row + FLASHATTN_INT64(d) * params.out.dim, total * inverse);
  }
  if (lane == 0)
    lse[query_index(params.lse, entry, h, simdgroup)] = row_lse(row_max, row_sum, units);
}
