// Backward, key side: dV, one threadgroup per block_k keys of one key/value head. Separate from dK
// so that both fit in registers; the price is that each recomputes the scores.
//
//   for each query head of the group, for each block of block_q rows:
//     S^T = K Q^T;  P^T = exp2(c S^T - L log2 e)      four lanes per key
//     dV += P^T dO
#include "entries.h"
#include "modifiers.h"
#include "tile.h"

constant bool accumulate_dv [[function_constant(kConstantAccumulate)]];

// Products of the lane's key j with a block of rows become what V's gradient weights them with, in
// place. column_lse is as exponent_of_lse makes it.
template <uint block_q>
void key_row_probabilities(threadgroup float* key_scores, threadgroup const float* column_lse,
                           thread const HeadModifiers& head, uint first_row, uint j, Range rows,
                           float scale, uint quarter) {
  for (uint c = quarter; c < block_q; c += kLanesPerRow) {
    const int i = int(first_row + c);
    float p = 0.0f;
    if (i >= rows.begin && i < rows.end && column_lse[c] != -INFINITY) {
      p = pair_weight(head, key_scores[c], scale, column_lse[c], uint(i), j).p;
      if (has_dropout) p *= dropout_factor(head.dropout, uint(i), j);
    }
    key_scores[c] = p;
  }
}

// Tensors: (batch, row, head, dim) by params' strides; lse: (batch, head, row); the options'
// arguments as modifiers.h says.
template <typename T, uint head_tile, uint value_tile, uint block_k, uint block_q>
[[kernel]] void backward_dv(
    device const T* query [[buffer(kBufferQuery)]], device const T* key [[buffer(kBufferKey)]],
    device const float* lse [[buffer(kBufferLse)]], device const T* dout [[buffer(kBufferDout)]],
    device T* dv [[buffer(kBufferDv)]],
    device const RowInterval* row_intervals [[buffer(kBufferRowIntervals)]],
    constant AttentionParams& params [[buffer(kBufferParams)]], FLASHATTN_MODIFIER_ARGUMENTS,
    FLASHATTN_ENTRY_ARGUMENT, uint threadgroup_index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr uint threads = block_k / kFragment * kSimdWidth;
  constexpr uint query_stride = head_tile + kPadding;
  constexpr uint dout_stride = value_tile + kPadding;
  constexpr uint score_stride = block_q + kPadding;
  threadgroup float arena[max3(block_q * (query_stride + dout_stride), block_k * head_tile,
                               block_k * value_tile)];
  threadgroup float scores[block_k * score_stride];
  threadgroup float scratch[block_k / kFragment * kFragmentSize];
  threadgroup float column_lse[block_q];
  threadgroup uint visible[block_k];
  threadgroup uint non_finite[block_k / kFragment];

  // Early keys are seen by the most causal rows: they go first.
  const uint task = params.first_threadgroup + threadgroup_index;
  const uint head_tasks = params.batch * params.kv_heads;
  const uint first_key = task / head_tasks * block_k;
  const uint b = task % head_tasks / params.kv_heads;
  const uint kv_head = task % params.kv_heads;
  const EntryRows entry = entry_rows(params, entries, b);
  if (is_ragged && first_key >= entry.seqlen_k) return;
  const uint valid_keys = min(block_k, entry.seqlen_k - first_key);

  threadgroup float* own_scores = scores + simdgroup * kFragment * score_stride;
  threadgroup uint* own_visible = visible + simdgroup * kFragment;
  const LaneRow at = lane_row(lane);
  const RowInterval interval = row_intervals[b];
  const uint key_index = first_key + simdgroup * kFragment + at.row;
  const Range rows = rows_of_key(interval, entry.seqlen_q, key_index);
  const float scale = pair_scale(params.scale, params.scale_log2e);
  const Range block_rows = rows_of_keys(interval, entry.seqlen_q, first_key, block_k);

  simdgroup_float8x8 K[head_tile / kFragment];
  simdgroup_float8x8 dV[value_tile / kFragment];
  stage_rows<block_k, head_tile, threads>(arena, head_tile,
                                          key_pointer(key, params.key, entry, kv_head, first_key),
                                          params.key, valid_keys, params.head_dim, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  load_strip(K, arena + simdgroup * kFragment * head_tile, head_tile);
  fill_zero(dV);

  threadgroup float* Q = arena;
  threadgroup float* dO = arena + block_q * query_stride;
  for (uint g = 0; g < params.heads_per_kv; ++g) {
    const uint h = kv_head * params.heads_per_kv + g;
    const HeadModifiers head = head_modifiers(modifiers, mask, alibi_slopes, row_shifts, b, h);
    for (uint i = uint(block_rows.begin) / block_q * block_q; int(i) < block_rows.end;
         i += block_q) {
      if (has_mask && mask_tile_class(modifiers, mask_tiles, b, h, i, first_key) == kMaskTileNone) {
        continue;
      }
      const uint valid_rows = min(block_q, entry.seqlen_q - i);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_rows<block_q, head_tile, threads>(
          Q, query_stride, query_pointer(query, params.query, entry, h, i), params.query,
          valid_rows, params.head_dim, thread_index);
      const bool bad = stage_rows<block_q, value_tile, threads>(
          dO, dout_stride, query_pointer(dout, params.dout, entry, h, i), params.dout, valid_rows,
          params.value_dim, thread_index);
      if (thread_index < block_q) {
        column_lse[thread_index] =
            thread_index < valid_rows
                ? exponent_of_lse(lse[query_index(params.lse, entry, h, i + thread_index)])
                : 0.0f;
      }
      const bool any_bad = simd_any(bad);
      if (lane == 0) non_finite[simdgroup] = any_bad ? 1u : 0u;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      uint poisoned = 0;
      for (uint s = 0; s < block_k / kFragment; ++s) poisoned |= non_finite[s];

      simdgroup_float8x8 S[block_q / kFragment];
      multiply_transposed(S, K, Q, query_stride);
      store_strip(S, own_scores, score_stride);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      key_row_probabilities<block_q>(own_scores + at.row * score_stride, column_lse, head, i,
                                     key_index, rows, scale, at.quarter);
      if (poisoned == 0u) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
        multiply_accumulate<block_q / kFragment>(dV, own_scores, score_stride, dO, dout_stride);
      } else {
        const uint bits = visible_columns<block_q>(column_lse, i, rows);
        if (at.quarter == 0) {
          own_visible[at.row] = unmasked_rows<block_q>(bits, head, i, key_index);
        }
        accumulate_selected<block_q / kFragment>(dV, own_scores, score_stride, dO, dout_stride,
                                                 own_visible, scratch + simdgroup * kFragmentSize,
                                                 lane);
      }
    }
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);
  store_strip(dV, arena + simdgroup * kFragment * value_tile, value_tile);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  write_rows<block_k, value_tile, threads>(key_pointer(dv, params.dv, entry, kv_head, first_key),
                                           params.dv, arena, value_tile, valid_keys,
                                           params.value_dim, accumulate_dv, thread_index);
}
