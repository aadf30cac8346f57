// Backward, query side: dQ, one threadgroup per block_q query rows of one head. Scores are
// recomputed from Q, K and the saved log-sum-exp, so nothing is rescaled and nothing quadratic is
// stored.
//
//   for each block of block_k keys:
//     S = Q K^T;  dP = dO V^T
//     P = exp2(c S - L log2 e);  dS = P * (dP - delta)      four lanes per row
//     dQ += dS K
//   dQ *= scale
#include "entries.h"
#include "modifiers.h"
#include "tile.h"

constant bool accumulate_dq [[function_constant(kConstantAccumulate)]];
constant bool writes_slope_rows [[function_constant(kConstantSlopeGradient)]];

// What the gradients of one row are computed from.
struct QueryRow {
  uint i;
  Range keys;
  float lse;  // as exponent_of_lse makes it
  float delta;
};

// Products of the lane's row become gradients of scale * (q . k) in place. Returns what these keys
// add to the gradient of the head's ALiBi slope.
template <uint block_k>
float query_row_gradient(threadgroup float* row_scores, threadgroup const float* row_dp,
                         thread const HeadModifiers& head, QueryRow row, uint first_key,
                         float scale, uint quarter) {
  float slope_sum = 0.0f;
  for (uint c = quarter; c < block_k; c += kLanesPerRow) {
    const int j = int(first_key + c);
    float ds = 0.0f;
    if (j >= row.keys.begin && j < row.keys.end) {
      const PairWeight weight = pair_weight(head, row_scores[c], scale, row.lse, row.i, uint(j));
      ds = score_gradient(head, weight, row_dp[c], row.delta, row.i, uint(j));
      if (writes_slope_rows) slope_sum -= ds * alibi_distance(head, row.i, uint(j));
      if (has_softcap) ds *= weight.derivative;
    }
    row_scores[c] = ds;
  }
  return slope_sum;
}

// Tensors: (batch, row, head, dim) by params' strides; lse: (batch, head, row); delta: contiguous
// (batch, query_heads, table_rows), as slope_rows; the options' arguments as modifiers.h says.
template <typename T, uint head_tile, uint value_tile, uint block_q, uint block_k>
[[kernel]] void backward_dq(
    device const T* query [[buffer(kBufferQuery)]], device const T* key [[buffer(kBufferKey)]],
    device const T* value [[buffer(kBufferValue)]], device const float* lse [[buffer(kBufferLse)]],
    device const T* dout [[buffer(kBufferDout)]],
    device const float* delta [[buffer(kBufferDelta)]], device T* dq [[buffer(kBufferDq)]],
    device const RowInterval* row_intervals [[buffer(kBufferRowIntervals)]],
    constant AttentionParams& params [[buffer(kBufferParams)]], FLASHATTN_MODIFIER_ARGUMENTS,
    device float* slope_rows [[buffer(kBufferSlopeRows), function_constant(writes_slope_rows)]],
    FLASHATTN_ENTRY_ARGUMENT, uint threadgroup_index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr uint threads = block_q / kFragment * kSimdWidth;
  constexpr uint key_stride = head_tile + kPadding;
  constexpr uint value_stride = value_tile + kPadding;
  constexpr uint score_stride = block_k + kPadding;
  threadgroup float
      arena[max3(block_k * (key_stride + value_stride), block_q * head_tile, block_q * value_tile)];
  threadgroup float scores[block_q * score_stride];
  threadgroup float dp[block_q * score_stride];
  threadgroup float scratch[block_q / kFragment * kFragmentSize];
  threadgroup uint visible[block_q];
  threadgroup uint non_finite[block_q / kFragment];

  // Long causal rows first, as in the forward pass.
  const uint blocks = (params.seqlen_q + block_q - 1) / block_q;
  const uint task = params.first_threadgroup + threadgroup_index;
  const uint head_tasks = params.batch * params.query_heads;
  const uint first_row = (blocks - 1 - task / head_tasks) * block_q;
  const uint b = task % head_tasks / params.query_heads;
  const uint h = task % params.query_heads;
  const uint kv_head = h / params.heads_per_kv;
  const EntryRows entry = entry_rows(params, entries, b);
  if (is_ragged && first_row >= entry.seqlen_q) return;
  const uint valid_rows = min(block_q, entry.seqlen_q - first_row);

  threadgroup float* own_scores = scores + simdgroup * kFragment * score_stride;
  threadgroup float* own_dp = dp + simdgroup * kFragment * score_stride;
  threadgroup uint* own_visible = visible + simdgroup * kFragment;
  const LaneRow at = lane_row(lane);
  const RowInterval interval = row_intervals[b];
  const HeadModifiers head = head_modifiers(modifiers, mask, alibi_slopes, row_shifts, b, h);
  const float scale = pair_scale(params.scale, params.scale_log2e);
  const FLASHATTN_INT64 head_rows = table_index(params, entry, h);
  QueryRow row;
  row.i = first_row + simdgroup * kFragment + at.row;
  row.keys = keys_of_row(interval, entry.seqlen_q, row.i);
  row.lse = 0.0f;
  row.delta = 0.0f;
  const Range block_keys = keys_of_rows(interval, entry.seqlen_q, first_row, block_q);
  if (row.i < entry.seqlen_q) {
    row.lse = exponent_of_lse(lse[query_index(params.lse, entry, h, row.i)]);
    row.delta = delta[head_rows + row.i];
  }
  if (row.lse == -INFINITY) row.keys.end = 0;  // a row without weights has no gradient
  float slope_sum = 0.0f;

  simdgroup_float8x8 Q[head_tile / kFragment];
  simdgroup_float8x8 dO[value_tile / kFragment];
  simdgroup_float8x8 dQ[head_tile / kFragment];
  stage_rows<block_q, head_tile, threads>(arena, head_tile,
                                          query_pointer(query, params.query, entry, h, first_row),
                                          params.query, valid_rows, params.head_dim, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  load_strip(Q, arena + simdgroup * kFragment * head_tile, head_tile);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  stage_rows<block_q, value_tile, threads>(arena, value_tile,
                                           query_pointer(dout, params.dout, entry, h, first_row),
                                           params.dout, valid_rows, params.value_dim, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  load_strip(dO, arena + simdgroup * kFragment * value_tile, value_tile);
  fill_zero(dQ);

  threadgroup float* K = arena;
  threadgroup float* V = arena + block_k * key_stride;
  for (uint j = uint(block_keys.begin) / block_k * block_k; int(j) < block_keys.end; j += block_k) {
    if (has_mask && mask_tile_class(modifiers, mask_tiles, b, h, first_row, j) == kMaskTileNone) {
      continue;
    }
    const uint valid_keys = min(block_k, uint(interval.key_limit) - j);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const bool bad = stage_rows<block_k, head_tile, threads>(
        K, key_stride, key_pointer(key, params.key, entry, kv_head, j), params.key, valid_keys,
        params.head_dim, thread_index);
    stage_rows<block_k, value_tile, threads>(
        V, value_stride, key_pointer(value, params.value, entry, kv_head, j), params.value,
        valid_keys, params.value_dim, thread_index);
    const bool any_bad = simd_any(bad);
    if (lane == 0) non_finite[simdgroup] = any_bad ? 1u : 0u;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint poisoned = 0;
    for (uint s = 0; s < block_q / kFragment; ++s) poisoned |= non_finite[s];

    simdgroup_float8x8 S[block_k / kFragment];
    multiply_transposed(S, Q, K, key_stride);
    store_strip(S, own_scores, score_stride);
    multiply_transposed(S, dO, V, value_stride);
    store_strip(S, own_dp, score_stride);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    slope_sum += query_row_gradient<block_k>(own_scores + at.row * score_stride,
                                             own_dp + at.row * score_stride, head, row, j, scale,
                                             at.quarter);
    if (poisoned == 0u) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
      multiply_accumulate<block_k / kFragment>(dQ, own_scores, score_stride, K, key_stride);
    } else {
      if (at.quarter == 0) {
        own_visible[at.row] =
            unmasked_keys<block_k>(columns_in<block_k>(row.keys, j), head, row.i, j);
      }
      accumulate_selected<block_k / kFragment>(dQ, own_scores, score_stride, K, key_stride,
                                               own_visible, scratch + simdgroup * kFragmentSize,
                                               lane);
    }
  }

  if (writes_slope_rows) {
    slope_sum = row_sum4(slope_sum);
    if (at.quarter == 0 && row.i < entry.seqlen_q) slope_rows[head_rows + row.i] = slope_sum;
  }
  scale_strip(dQ, params.scale);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store_strip(dQ, arena + simdgroup * kFragment * head_tile, head_tile);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  write_rows<block_q, head_tile, threads>(query_pointer(dq, params.dq, entry, h, first_row),
                                          params.dq, arena, head_tile, valid_rows, params.head_dim,
                                          accumulate_dq, thread_index);
}
