// Backward, key side: dK and dV, or one of them, scores in registers. A simdgroup owns 8 *
// row_fragments keys of one key/value head; Q and dO pass through threadgroup memory, two barriers
// a block. The scores are computed transposed, which makes P^T and dS^T left factors where they
// are: no lane needs another one's scores, and every lane map will do.
//
//   for each query head of the group, for each block of block_q rows:
//     S^T = K Q^T;  P^T = exp2(c S^T - L log2 e)
//     dV += P^T dO
//     dP^T = V dO^T;  dS^T = P^T * (dP^T - delta);  dK += dS^T Q
//   dK *= scale
// Both at once share S^T and P^T: four products instead of five.
#include "entries.h"
#include "register_finite.h"
#include "register_gradient.h"
#include "register_product.h"
#include "register_tile.h"
#include "tile.h"

constant bool accumulate_dkv [[function_constant(kConstantAccumulate)]];

// What a block of query rows brings along: log-sum-exps as gradient_lse makes them, deltas, and
// whether a row that exists has no weights.
template <uint block_q, uint threads>
bool stage_columns(threadgroup float* column_lse, threadgroup float* column_delta,
                   device const float* lse, device const float* delta,
                   constant AttentionParams& params, EntryRows entry, uint h, int first_row,
                   uint thread_index) {
  bool dead = false;
  for (uint c = thread_index; c < block_q; c += threads) {
    const uint row = uint(first_row) + c;
    float row_lse = INFINITY;
    float row_delta = 0.0f;
    if (row < entry.seqlen_q) {
      row_lse = gradient_lse(lse[query_index(params.lse, entry, h, row)]);
      row_delta = delta[table_index(params, entry, h) + row];
      dead = dead || row_lse == INFINITY;
    }
    column_lse[c] = row_lse;
    column_delta[c] = row_delta;
  }
  return dead;
}

// Elements of a strip whose column has weights.
template <uint columns>
uint weighted_columns(threadgroup const float* column_lse, LaneMap map) {
  uint bits = 0;
#pragma clang loop unroll(full)
  for (uint i = 0; i < columns; ++i) {
    if (column_lse[i * kFragment + map.column0] != INFINITY) bits |= 1u << (2 * i);
    if (column_lse[i * kFragment + map.column1] != INFINITY) bits |= 2u << (2 * i);
  }
  return bits;
}

// S^T becomes P^T in place.
template <uint row_fragments, uint columns>
void weights_of_columns(thread simdgroup_float8x8 (&S)[row_fragments][columns],
                        threadgroup const float* column_lse, float scale_log2e, LaneMap map) {
#pragma clang loop unroll(full)
  for (uint i = 0; i < columns; ++i) {
    const float lse0 = column_lse[i * kFragment + map.column0];
    const float lse1 = column_lse[i * kFragment + map.column1];
#pragma clang loop unroll(full)
    for (uint r = 0; r < row_fragments; ++r) {
      S[r][i].thread_elements()[0] =
          weight_from_lse(S[r][i].thread_elements()[0], lse0, scale_log2e);
      S[r][i].thread_elements()[1] =
          weight_from_lse(S[r][i].thread_elements()[1], lse1, scale_log2e);
    }
  }
}

// P^T becomes dS^T in place.
template <uint row_fragments, uint columns>
void gradients_of_columns(thread simdgroup_float8x8 (&P)[row_fragments][columns],
                          thread simdgroup_float8x8 (&dP)[row_fragments][columns],
                          threadgroup const float* column_delta, LaneMap map) {
#pragma clang loop unroll(full)
  for (uint i = 0; i < columns; ++i) {
    const float delta0 = column_delta[i * kFragment + map.column0];
    const float delta1 = column_delta[i * kFragment + map.column1];
#pragma clang loop unroll(full)
    for (uint r = 0; r < row_fragments; ++r) {
      P[r][i].thread_elements()[0] *= dP[r][i].thread_elements()[0] - delta0;
      P[r][i].thread_elements()[1] *= dP[r][i].thread_elements()[1] - delta1;
    }
  }
}

// Adds the non-finite values of a tile of query rows, or of their dO, to the keys that these rows
// see and have weights for.
template <uint block_q, uint stride, bool as_nan, uint row_fragments, uint columns, typename F>
void add_seen_by_keys(thread simdgroup_float8x8 (&sum)[row_fragments][columns], uint first_key,
                      uint first_row, RowInterval interval, uint seqlen_q,
                      threadgroup const float* column_lse, thread const HeadModifiers& head,
                      threadgroup const F* tile, LaneMap map) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
    const uint key0 = first_key + r * kFragment + map.row0;
    const uint key1 = first_key + r * kFragment + map.row1;
    add_non_finite<block_q, stride, as_nan>(
        sum[r],
        seen_rows<block_q>(rows_of_key(interval, seqlen_q, key0), column_lse, head, first_row,
                           key0),
        seen_rows<block_q>(rows_of_key(interval, seqlen_q, key1), column_lse, head, first_row,
                           key1),
        tile, map);
  }
}

// Tensors: (batch, row, head, dim) by params' strides; lse: (batch, head, row); delta: contiguous
// (batch, query_heads, table_rows). key_held is head_tile / 8, or 1 where K is read again for every
// block; value_held likewise.
template <typename T, typename F, uint head_tile, uint value_tile, uint row_fragments, uint block_q,
          uint simdgroups, uint key_held, uint value_held, bool with_dv, bool with_dk,
          uint exchange>
[[kernel, max_total_threads_per_threadgroup(simdgroups * 32)]] void register_dkv(
    device const T* query [[buffer(kBufferQuery)]], device const T* key [[buffer(kBufferKey)]],
    device const T* value [[buffer(kBufferValue)]], device const float* lse [[buffer(kBufferLse)]],
    device const T* dout [[buffer(kBufferDout)]],
    device const float* delta [[buffer(kBufferDelta)]], device T* dk [[buffer(kBufferDk)]],
    device T* dv [[buffer(kBufferDv)]],
    device const RowInterval* row_intervals [[buffer(kBufferRowIntervals)]],
    constant AttentionParams& params [[buffer(kBufferParams)]],
    device atomic_uint* status [[buffer(kBufferStatus)]], FLASHATTN_MODIFIER_ARGUMENTS,
    FLASHATTN_ENTRY_ARGUMENT, uint threadgroup_index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr uint threads = simdgroups * kSimdWidth;
  constexpr uint columns = block_q / kFragment;
  constexpr uint own_keys = row_fragments * kFragment;
  constexpr uint block_k = simdgroups * own_keys;
  constexpr uint query_stride = padded<F>(head_tile);
  constexpr uint dout_stride = padded<F>(value_tile);
  alignas(16) threadgroup F Q[block_q * query_stride];
  alignas(16) threadgroup F dO[block_q * dout_stride];
  threadgroup float column_lse[block_q];
  threadgroup float column_delta[block_q];
  threadgroup uint dead[simdgroups];
  threadgroup uint flags[simdgroups];

  LaneMap map;
  if (!learn_lane_map<exchange, threads>(map, Q, (threadgroup float*)dO, thread_index, lane)) {
    if (thread_index == 0) raise_status(status, kStatusLaneMap);
    return;
  }

  // Early keys are seen by the most causal rows: they go first.
  const uint task = params.first_threadgroup + threadgroup_index;
  const uint head_tasks = params.batch * params.kv_heads;
  const uint block = params.first_block + task / head_tasks;
  const uint b = task % head_tasks / params.kv_heads;
  const uint kv_head = task % params.kv_heads;
  const EntryRows entry = entry_rows(params, entries, b);
  if (is_ragged && block * block_k >= entry.seqlen_k) return;
  const uint first_key = block * block_k + simdgroup * own_keys;
  const int valid_keys = int(entry.seqlen_k) - int(first_key);
  const RowInterval interval = row_intervals[b];
  const BlockRange block_rows = rows_of_block(interval, entry.seqlen_q, block * block_k, block_k);
  const BlockRange own_rows = rows_of_block(interval, entry.seqlen_q, first_key, own_keys);

  device const T* K_rows = key_pointer(key, params.key, entry, kv_head, first_key);
  device const T* V_rows = key_pointer(value, params.value, entry, kv_head, first_key);
  simdgroup_matrix<F, 8, 8> K[row_fragments][key_held];
  simdgroup_matrix<F, 8, 8> V[row_fragments][value_held];
  simdgroup_float8x8 dK[row_fragments][with_dk ? head_tile / kFragment : 1];
  simdgroup_float8x8 dV[row_fragments][with_dv ? value_tile / kFragment : 1];
  load_held<row_fragments, key_held, head_tile / kFragment>(K, K_rows, params.key, valid_keys,
                                                            params.head_dim, map);
  if (with_dk) {
    load_held<row_fragments, value_held, value_tile / kFragment>(V, V_rows, params.value,
                                                                 valid_keys, params.value_dim, map);
  }
  set_zero(dK);
  set_zero(dV);

  for (uint g = 0; g < params.heads_per_kv; ++g) {
    const uint h = kv_head * params.heads_per_kv + g;
    const HeadModifiers head = head_modifiers(modifiers, mask, alibi_slopes, row_shifts, b, h);
    device const T* Q_head = query_pointer(query, params.query, entry, h, 0);
    device const T* dO_head = query_pointer(dout, params.dout, entry, h, 0);
    for (int i = block_rows.any.begin / int(block_q) * int(block_q); i < block_rows.any.end;
         i += int(block_q)) {
      if (!mask_shows_keys(modifiers, mask_tiles, b, h, uint(i), block * block_k, block_k,
                           entry.seqlen_k)) {
        continue;  // the same for the whole threadgroup
      }
      const uint valid_rows = uint(min(int(block_q), int(entry.seqlen_q) - i));
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_tile<block_q, head_tile, query_stride, threads>(
          Q, Q_head + FLASHATTN_INT64(i) * params.query.row, params.query, valid_rows,
          params.head_dim, thread_index);
      stage_tile<block_q, value_tile, dout_stride, threads>(
          dO, dO_head + FLASHATTN_INT64(i) * params.dout.row, params.dout, valid_rows,
          params.value_dim, thread_index);
      const bool column_dead = simd_any(stage_columns<block_q, threads>(
          column_lse, column_delta, lse, delta, params, entry, h, i, thread_index));
      if (lane == 0) dead[simdgroup] = column_dead ? 1u : 0u;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      // Columns are staged by the first simdgroups.
      uint some_dead = 0;
      for (uint s = 0; s < min(simdgroups, (block_q + kSimdWidth - 1) / kSimdWidth); ++s) {
        some_dead |= dead[s];
      }
      bool poisoned = false;
      if (has_mask || some_dead != 0u || !covers(block_rows.all, i, valid_rows)) {
        const bool in_query =
            with_dk &&
            share_is_non_finite<block_q, head_tile, query_stride, threads>(Q, thread_index);
        const bool in_dout =
            with_dv &&
            share_is_non_finite<block_q, value_tile, dout_stride, threads>(dO, thread_index);
        poisoned = must_select<threads>(in_query || in_dout, status, flags, lane, simdgroup);
      }
      if (!poisoned && (!overlaps(own_rows.any, i, block_q) ||
                        !mask_shows_keys(modifiers, mask_tiles, b, h, uint(i), first_key, own_keys,
                                         entry.seqlen_k))) {
        continue;
      }

      simdgroup_float8x8 S[row_fragments][columns];
      simdgroup_float8x8 derivatives[row_fragments][columns];
      simdgroup_matrix<F, 8, 8> factors[row_fragments][columns];
      uint visible[row_fragments];
      multiply_by_transposed<head_tile / kFragment, query_stride>(S, K, Q, K_rows, params.key,
                                                                  valid_keys, params.head_dim, map);
      const bool masked = some_dead != 0u || !covers(own_rows.all, i, valid_rows) ||
                          (changes_scores() && (!full_rows || valid_rows < block_q));
#pragma clang loop unroll(full)
      for (uint r = 0; r < row_fragments; ++r) {
        const uint key_row = first_key + r * kFragment;
        visible[r] = kAllElements;
        if (masked) {
          visible[r] = weighted_columns<columns>(column_lse, map) &
                       elements_in<columns>(
                           rows_of_key(interval, entry.seqlen_q, key_row + map.row0),
                           rows_of_key(interval, entry.seqlen_q, key_row + map.row1), i, map);
        }
        if (has_softcap) softcap_derivatives(derivatives[r], S[r], head, params.scale);
        if (changes_scores()) {
          modify_strip<true>(S[r], visible[r], head, params.scale,
                             strip_place(key_row, uint(i), map));
        }
      }
      weights_of_columns(S, column_lse, params.scale_log2e, map);
      if (masked || has_mask) fill_hidden_strips(S, visible, 0.0f);
      if (with_dv) {
        if (poisoned) {
          add_seen_by_keys<block_q, dout_stride, false>(dV, first_key, uint(i), interval,
                                                        entry.seqlen_q, column_lse, head, dO, map);
          drop_non_finite<block_q, value_tile, dout_stride, threads>(dO, thread_index);
        }
        if (has_dropout) {
          dropped_factors<true>(factors, S, visible, head.dropout,
                                strip_place(first_key, uint(i), map));
        } else {
          to_factors(factors, S);
        }
        add_product<dout_stride>(dV, factors, dO);
      }
      if (with_dk) {
        if (with_dv && poisoned) {  // dP takes dO as it is
          threadgroup_barrier(mem_flags::mem_threadgroup);
          stage_tile<block_q, value_tile, dout_stride, threads>(
              dO, dO_head + FLASHATTN_INT64(i) * params.dout.row, params.dout, valid_rows,
              params.value_dim, thread_index);
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        simdgroup_float8x8 dP[row_fragments][columns];
        multiply_by_transposed<value_tile / kFragment, dout_stride>(
            dP, V, dO, V_rows, params.value, valid_keys, params.value_dim, map);
        if (has_dropout) {
          drop_strips<true>(dP, visible, head.dropout, strip_place(first_key, uint(i), map));
        }
        gradients_of_columns(S, dP, column_delta, map);
        if (masked || has_mask) fill_hidden_strips(S, visible, 0.0f);
        if (has_softcap) multiply_strips(S, derivatives);
        if (poisoned) {
          add_seen_by_keys<block_q, query_stride, true>(dK, first_key, uint(i), interval,
                                                        entry.seqlen_q, column_lse, head, Q, map);
          drop_non_finite<block_q, head_tile, query_stride, threads>(Q, thread_index);
        }
        to_factors(factors, S);
        add_product<query_stride>(dK, factors, Q);
      }
    }
  }

  if (with_dk) {
    store_strips(dK, key_pointer(dk, params.dk, entry, kv_head, first_key), params.dk, valid_keys,
                 params.head_dim, params.scale, accumulate_dkv, map);
  }
  if (with_dv) {
    store_strips(dV, key_pointer(dv, params.dv, entry, kv_head, first_key), params.dv, valid_keys,
                 params.value_dim, 1.0f, accumulate_dkv, map);
  }
}
