// Backward, query side: dQ, scores in registers. A simdgroup owns 8 * row_fragments query rows; K
// and V pass through threadgroup memory, two barriers a block. Scores are recomputed from Q, K and
// the saved log-sum-exp: no lane needs another one's scores, and every lane map will do. To know
// Apple's (exchange) saves registers.
//
//   for each block of block_k keys:
//     S = Q K^T;  P = exp2(c S - L log2 e);  dP = dO V^T;  dS = P * (dP - delta)
//     dQ += dS K
//   dQ *= scale
#include "entries.h"
#include "exchange.h"
#include "register_finite.h"
#include "register_gradient.h"
#include "register_product.h"
#include "register_tile.h"
#include "tile.h"

constant bool accumulate_dq [[function_constant(kConstantAccumulate)]];
constant bool writes_slope_rows [[function_constant(kConstantSlopeGradient)]];

// What a lane knows of the rows of its two elements.
template <uint row_fragments>
struct RowGradients {
  float lse[row_fragments][2];  // as gradient_lse makes it
  float delta[row_fragments][2];
  float slope[row_fragments][2];  // what was summed for dalibi_slopes
  uint dead;  // bit 2 r + e: the row of element e of strip r exists and has no weights
};

// lse, delta: (batch, head, row).
template <uint row_fragments>
void load_row_gradients(thread RowGradients<row_fragments>& rows, device const float* lse,
                        device const float* delta, constant AttentionParams& params,
                        EntryRows entry, uint h, uint first_row, LaneMap map) {
  rows.dead = 0;
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
#pragma clang loop unroll(full)
    for (uint e = 0; e < 2; ++e) {
      const uint row = first_row + r * kFragment + (e == 0 ? map.row0 : map.row1);
      rows.lse[r][e] = INFINITY;
      rows.delta[r][e] = 0.0f;
      rows.slope[r][e] = 0.0f;
      if (full_rows || row < entry.seqlen_q) {
        const float natural = lse[query_index(params.lse, entry, h, row)];
        if (natural == -INFINITY) rows.dead |= 1u << (2 * r + e);
        rows.lse[r][e] = gradient_lse(natural);
        rows.delta[r][e] = delta[table_index(params, entry, h) + row];
      }
    }
  }
}

// Keys that the row of an element sees and has weights for.
inline Range weighted_keys(RowInterval interval, uint seqlen_q, uint row, bool dead) {
  Range keys = keys_of_row(interval, seqlen_q, row);
  if (dead) keys.end = 0;
  return keys;
}

// S becomes P in place.
template <uint row_fragments, uint columns>
void weights_of_rows(thread simdgroup_float8x8 (&S)[row_fragments][columns],
                     thread RowGradients<row_fragments>& rows, float scale_log2e) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
#pragma clang loop unroll(full)
    for (uint j = 0; j < columns; ++j) {
      S[r][j].thread_elements()[0] =
          weight_from_lse(S[r][j].thread_elements()[0], rows.lse[r][0], scale_log2e);
      S[r][j].thread_elements()[1] =
          weight_from_lse(S[r][j].thread_elements()[1], rows.lse[r][1], scale_log2e);
    }
  }
}

// P becomes dS in place.
template <uint columns>
void gradients_of_rows(thread simdgroup_float8x8 (&P)[columns],
                       thread simdgroup_float8x8 (&dP)[columns], float delta0, float delta1) {
#pragma clang loop unroll(full)
  for (uint j = 0; j < columns; ++j) {
    P[j].thread_elements()[0] *= dP[j].thread_elements()[0] - delta0;
    P[j].thread_elements()[1] *= dP[j].thread_elements()[1] - delta1;
  }
}

// Adds -dS |pos(i) - pos(j)| of the visible elements.
template <uint columns>
void add_slope_gradient(thread float& slope0, thread float& slope1,
                        thread simdgroup_float8x8 (&dS)[columns], uint visible,
                        thread const HeadModifiers& head, StripPlace place) {
#pragma clang loop unroll(full)
  for (uint j = 0; j < columns; ++j) {
    const uint key = j * kFragment;
    if (has_element(visible, j, 0)) {
      slope0 -= dS[j].thread_elements()[0] * alibi_distance(head, place.row0, place.column0 + key);
    }
    if (has_element(visible, j, 1)) {
      slope1 -= dS[j].thread_elements()[1] * alibi_distance(head, place.row1, place.column1 + key);
    }
  }
}

// Writes each row's sum over its lanes.
template <uint row_fragments>
void store_row_sums(device float* target, thread float (&sums)[row_fragments][2], uint first_row,
                    uint seqlen_q, LaneMap map, threadgroup float* table, uint lane) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
    float sum0 = sums[r][0];
    float sum1 = sums[r][1];
    combine_rows<kExchangeAny>(sum0, sum1, map, table, lane, SumOf());
    const uint row = first_row + r * kFragment;
    if (map.column0 == 0 && row + map.row0 < seqlen_q) target[row + map.row0] = sum0;
    if (map.column1 == 0 && row + map.row1 < seqlen_q) target[row + map.row1] = sum1;
  }
}

// Tensors: (batch, row, head, dim) by params' strides; lse: (batch, head, row); delta, slope_rows:
// contiguous (batch, query_heads, table_rows). query_held is head_tile / 8, or 1 where Q is read
// again for every block; dout_held likewise.
template <typename T, typename F, uint head_tile, uint value_tile, uint row_fragments, uint block_k,
          uint simdgroups, uint query_held, uint dout_held, uint exchange>
[[kernel, max_total_threads_per_threadgroup(simdgroups * 32)]] void register_dq(
    device const T* query [[buffer(kBufferQuery)]], device const T* key [[buffer(kBufferKey)]],
    device const T* value [[buffer(kBufferValue)]], device const float* lse [[buffer(kBufferLse)]],
    device const T* dout [[buffer(kBufferDout)]],
    device const float* delta [[buffer(kBufferDelta)]], device T* dq [[buffer(kBufferDq)]],
    device const RowInterval* row_intervals [[buffer(kBufferRowIntervals)]],
    constant AttentionParams& params [[buffer(kBufferParams)]],
    device atomic_uint* status [[buffer(kBufferStatus)]], FLASHATTN_MODIFIER_ARGUMENTS,
    device float* slope_rows [[buffer(kBufferSlopeRows), function_constant(writes_slope_rows)]],
    FLASHATTN_ENTRY_ARGUMENT, uint threadgroup_index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr uint threads = simdgroups * kSimdWidth;
  constexpr uint columns = block_k / kFragment;
  constexpr uint own_rows = row_fragments * kFragment;
  constexpr uint block_q = simdgroups * own_rows;
  constexpr uint key_stride = padded<F>(head_tile);
  constexpr uint value_stride = padded<F>(value_tile);
  alignas(16) threadgroup F K[block_k * key_stride];
  alignas(16) threadgroup F V[block_k * value_stride];
  threadgroup uint flags[simdgroups];

  LaneMap map;
  if (!learn_lane_map<exchange, threads>(map, K, (threadgroup float*)V, thread_index, lane)) {
    if (thread_index == 0) raise_status(status, kStatusLaneMap);
    return;
  }

  // Long causal rows first, as in the forward pass.
  const uint task = params.first_threadgroup + threadgroup_index;
  const uint head_tasks = params.batch * params.query_heads;
  const uint block = params.first_block + params.blocks - 1 - task / head_tasks;
  const uint b = task % head_tasks / params.query_heads;
  const uint h = task % params.query_heads;
  const uint kv_head = h / params.heads_per_kv;
  const EntryRows entry = entry_rows(params, entries, b);
  if (is_ragged && block * block_q >= entry.seqlen_q) return;
  const uint first_row = block * block_q + simdgroup * own_rows;
  const int valid_rows = int(entry.seqlen_q) - int(first_row);
  const RowInterval interval = row_intervals[b];
  const BlockRange block_keys = keys_of_block(interval, entry.seqlen_q, block * block_q, block_q);
  BlockRange own_keys = keys_of_block(interval, entry.seqlen_q, first_row, own_rows);
  const HeadModifiers head = head_modifiers(modifiers, mask, alibi_slopes, row_shifts, b, h);

  device const T* Q_rows = query_pointer(query, params.query, entry, h, first_row);
  device const T* dO_rows = query_pointer(dout, params.dout, entry, h, first_row);
  simdgroup_matrix<F, 8, 8> Q[row_fragments][query_held];
  simdgroup_matrix<F, 8, 8> dO[row_fragments][dout_held];
  simdgroup_float8x8 dQ[row_fragments][head_tile / kFragment];
  load_held<row_fragments, query_held, head_tile / kFragment>(Q, Q_rows, params.query, valid_rows,
                                                              params.head_dim, map);
  load_held<row_fragments, dout_held, value_tile / kFragment>(dO, dO_rows, params.dout, valid_rows,
                                                              params.value_dim, map);
  set_zero(dQ);
  RowGradients<row_fragments> rows;
  load_row_gradients(rows, lse, delta, params, entry, h, first_row, map);
  const bool dead = simd_any(rows.dead != 0u);
  if (dead) own_keys.all.end = 0;  // no block goes without a mask
  const bool any_dead = any_thread<threads>(dead, flags, lane, simdgroup);

  device const T* K_head = key_pointer(key, params.key, entry, kv_head, 0);
  device const T* V_head = key_pointer(value, params.value, entry, kv_head, 0);
  for (int j = block_keys.any.begin / int(block_k) * int(block_k); j < block_keys.any.end;
       j += int(block_k)) {
    if (!mask_shows(modifiers, mask_tiles, b, h, block * block_q, block_q, entry.seqlen_q, j)) {
      continue;  // the same for the whole threadgroup
    }
    const uint valid_keys = uint(min(int(block_k), interval.key_limit - j));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_tile<block_k, head_tile, key_stride, threads>(
        K, K_head + FLASHATTN_INT64(j) * params.key.row, params.key, valid_keys, params.head_dim,
        thread_index);
    stage_tile<block_k, value_tile, value_stride, threads>(
        V, V_head + FLASHATTN_INT64(j) * params.value.row, params.value, valid_keys,
        params.value_dim, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    bool poisoned = false;
    if (has_mask || any_dead || !covers(block_keys.all, j, block_k)) {
      poisoned = must_select<threads>(
          share_is_non_finite<block_k, head_tile, key_stride, threads>(K, thread_index), status,
          flags, lane, simdgroup);
    }
    if (!poisoned &&
        (!overlaps(own_keys.any, j, block_k) ||
         !mask_shows(modifiers, mask_tiles, b, h, first_row, own_rows, entry.seqlen_q, j))) {
      continue;
    }

    simdgroup_float8x8 S[row_fragments][columns];
    simdgroup_float8x8 dP[row_fragments][columns];
    simdgroup_float8x8 derivatives[row_fragments][columns];
    multiply_by_transposed<head_tile / kFragment, key_stride>(S, Q, K, Q_rows, params.query,
                                                              valid_rows, params.head_dim, map);
    uint visible[row_fragments];
    const bool masked = !covers(own_keys.all, j, block_k) || (changes_scores() && !full_rows);
#pragma clang loop unroll(full)
    for (uint r = 0; r < row_fragments; ++r) {
      const uint row = first_row + r * kFragment;
      visible[r] = kAllElements;
      if (masked) {
        visible[r] = elements_in<columns>(
            weighted_keys(interval, entry.seqlen_q, row + map.row0, has_element(rows.dead, r, 0)),
            weighted_keys(interval, entry.seqlen_q, row + map.row1, has_element(rows.dead, r, 1)),
            j, map);
      }
      if (has_softcap) softcap_derivatives(derivatives[r], S[r], head, params.scale);
      if (changes_scores()) {
        modify_strip<false>(S[r], visible[r], head, params.scale, strip_place(row, uint(j), map));
      }
    }
    weights_of_rows(S, rows, params.scale_log2e);
    multiply_by_transposed<value_tile / kFragment, value_stride>(dP, dO, V, dO_rows, params.dout,
                                                                 valid_rows, params.value_dim, map);
    if (has_dropout) {
      drop_strips<false>(dP, visible, head.dropout, strip_place(first_row, uint(j), map));
    }
#pragma clang loop unroll(full)
    for (uint r = 0; r < row_fragments; ++r) {
      const StripPlace place = strip_place(first_row + r * kFragment, uint(j), map);
      gradients_of_rows(S[r], dP[r], rows.delta[r][0], rows.delta[r][1]);
      if (masked || has_mask) fill_hidden(S[r], visible[r], 0.0f);
      if (writes_slope_rows) {
        add_slope_gradient(rows.slope[r][0], rows.slope[r][1], S[r], visible[r], head, place);
      }
      if (has_softcap) multiply_elements(S[r], derivatives[r]);
    }
    if (poisoned) {
#pragma clang loop unroll(full)
      for (uint r = 0; r < row_fragments; ++r) {
        const uint row0 = first_row + r * kFragment + map.row0;
        const uint row1 = first_row + r * kFragment + map.row1;
        const Range keys0 =
            weighted_keys(interval, entry.seqlen_q, row0, has_element(rows.dead, r, 0));
        const Range keys1 =
            weighted_keys(interval, entry.seqlen_q, row1, has_element(rows.dead, r, 1));
        add_non_finite<block_k, key_stride, true>(
            dQ[r], seen_keys<block_k>(keys0, head, row0, uint(j)),
            seen_keys<block_k>(keys1, head, row1, uint(j)), K, map);
      }
      drop_non_finite<block_k, head_tile, key_stride, threads>(K, thread_index);
    }
    simdgroup_matrix<F, 8, 8> dS[row_fragments][columns];
    to_factors(dS, S);
    add_product<key_stride>(dQ, dS, K);
  }

  store_strips(dQ, query_pointer(dq, params.dq, entry, h, first_row), params.dq, valid_rows,
               params.head_dim, params.scale, accumulate_dq, map);
  if (!writes_slope_rows) return;
  // Sums over rows go through one table, simdgroup by simdgroup: the tile of K is free by now.
  threadgroup float* table = (threadgroup float*)K;
  device float* slopes = slope_rows + table_index(params, entry, h);
  for (uint s = 0; s < simdgroups; ++s) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == s) {
      store_row_sums(slopes, rows.slope, first_row, entry.seqlen_q, map, table, lane);
    }
  }
}
