// Backward, query side: dQ, one threadgroup per block_q query rows of one head. Scores are
// recomputed from Q, K and the saved log-sum-exp, so nothing is rescaled and nothing quadratic is
// stored.
//
//   for each block of block_k keys:
//     S = Q K^T;  dP = dO V^T
//     P = exp2(c S - L log2 e);  dS = P * (dP - delta)      four lanes per row
//     dQ += dS K
//   dQ *= scale
#include "tile.h"

constant bool accumulate_dq [[function_constant(kConstantAccumulate)]];

// Scores of the lane's row become score gradients in place.
template <uint block_k>
void query_row_gradient(threadgroup float* row_scores, threadgroup const float* row_dp,
                        uint first_key, Range keys, float scale_log2e, float lse_log2, float delta,
                        uint quarter) {
  for (uint c = quarter; c < block_k; c += kLanesPerRow) {
    const int j = int(first_key + c);
    float ds = 0.0f;
    if (j >= keys.begin && j < keys.end) {
      ds = exp2(row_scores[c] * scale_log2e - lse_log2) * (row_dp[c] - delta);
    }
    row_scores[c] = ds;
  }
}

// Tensors: (batch, row, head, dim) by params' strides; lse: (batch, head, row); delta: contiguous
// (batch, query_heads, seqlen_q).
template <typename T, uint head_tile, uint value_tile, uint block_q, uint block_k>
[[kernel]] void backward_dq(
    device const T* query [[buffer(kBufferQuery)]], device const T* key [[buffer(kBufferKey)]],
    device const T* value [[buffer(kBufferValue)]], device const float* lse [[buffer(kBufferLse)]],
    device const T* dout [[buffer(kBufferDout)]],
    device const float* delta [[buffer(kBufferDelta)]], device T* dq [[buffer(kBufferDq)]],
    device const RowInterval* row_intervals [[buffer(kBufferRowIntervals)]],
    constant AttentionParams& params [[buffer(kBufferParams)]],
    uint threadgroup_index [[threadgroup_position_in_grid]],
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
  const uint valid_rows = min(block_q, params.seqlen_q - first_row);

  threadgroup float* own_scores = scores + simdgroup * kFragment * score_stride;
  threadgroup float* own_dp = dp + simdgroup * kFragment * score_stride;
  threadgroup uint* own_visible = visible + simdgroup * kFragment;
  const LaneRow at = lane_row(lane);
  const uint row = first_row + simdgroup * kFragment + at.row;
  const RowInterval interval = row_intervals[b];
  Range keys = keys_of_row(interval, params.seqlen_q, row);
  const Range block_keys = keys_of_rows(interval, params.seqlen_q, first_row, block_q);
  float lse_log2 = 0.0f;
  float row_delta = 0.0f;
  if (row < params.seqlen_q) {
    lse_log2 = lse[scalar_index(params.lse, b, h, row)] * M_LOG2E_F;
    row_delta = delta[(FLASHATTN_INT64(b) * params.query_heads + h) * params.seqlen_q + row];
  }
  if (lse_log2 == -INFINITY) keys.end = 0;  // a row without weights has no gradient

  simdgroup_float8x8 Q[head_tile / kFragment];
  simdgroup_float8x8 dO[value_tile / kFragment];
  simdgroup_float8x8 dQ[head_tile / kFragment];
  stage_rows<block_q, head_tile, threads>(arena, head_tile,
                                          row_pointer(query, params.query, b, h, first_row),
                                          params.query, valid_rows, params.head_dim, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  load_strip(Q, arena + simdgroup * kFragment * head_tile, head_tile);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  stage_rows<block_q, value_tile, threads>(arena, value_tile,
                                           row_pointer(dout, params.dout, b, h, first_row),
                                           params.dout, valid_rows, params.value_dim, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  load_strip(dO, arena + simdgroup * kFragment * value_tile, value_tile);
  fill_zero(dQ);

  threadgroup float* K = arena;
  threadgroup float* V = arena + block_k * key_stride;
  for (uint j = uint(block_keys.begin) / block_k * block_k; int(j) < block_keys.end; j += block_k) {
    const uint valid_keys = min(block_k, uint(interval.key_limit) - j);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const bool bad = stage_rows<block_k, head_tile, threads>(
        K, key_stride, row_pointer(key, params.key, b, kv_head, j), params.key, valid_keys,
        params.head_dim, thread_index);
    stage_rows<block_k, value_tile, threads>(
        V, value_stride, row_pointer(value, params.value, b, kv_head, j), params.value, valid_keys,
        params.value_dim, thread_index);
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
    query_row_gradient<block_k>(own_scores + at.row * score_stride, own_dp + at.row * score_stride,
                                j, keys, params.scale_log2e, lse_log2, row_delta, at.quarter);
    if (poisoned == 0u) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
      multiply_accumulate<block_k / kFragment>(dQ, own_scores, score_stride, K, key_stride);
    } else {
      if (at.quarter == 0) own_visible[at.row] = columns_in<block_k>(keys, j);
      accumulate_selected<block_k / kFragment>(dQ, own_scores, score_stride, K, key_stride,
                                               own_visible, scratch + simdgroup * kFragmentSize,
                                               lane);
    }
  }

  scale_strip(dQ, params.scale);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store_strip(dQ, arena + simdgroup * kFragment * head_tile, head_tile);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  write_rows<block_q, head_tile, threads>(row_pointer(dq, params.dq, b, h, first_row), params.dq,
                                          arena, head_tile, valid_rows, params.head_dim,
                                          accumulate_dq, thread_index);
}
