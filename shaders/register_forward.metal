// Forward: out = softmax(scale * Q K^T) V and its log-sum-exp, scores in registers. A simdgroup
// owns 8 * row_fragments query rows for the whole kernel: Q, O and each row's running maximum and
// sum; S and P never leave it. K and V pass through threadgroup memory, two barriers a block.
//
//   for each block of block_k keys:
//     S = Q K^T                                           fragments
//     m' = max(m, rowmax(S)) where that rises by more than max_slack, else m     (per row)
//     P = exp2(c S - c m');  l = l * exp2(c (m - m')) + P per lane;  O likewise + P V
//   l = rowsum(l);  O = diag(1 / l) O;  L = scale m + log l
// c = |scale| * log2(e); with a negative scale S changes its sign. With an option that changes
// scores, S is in natural units instead, as modifiers.h makes it, and c = log2(e). A sink is where
// m and l start. Dropout multiplies P on its way to V and leaves l alone.
//
// Lanes exchange maxima only when a vote says that some row of theirs rose, and sums once, at the
// end. Whether a row's maximum moves depends on that row alone, so its bits do not depend on its
// neighbours. With max_slack = 0 this is the exact online softmax; otherwise P may grow to
// 2^max_slack, which float does not notice.
#include "block_ranges.h"
#include "exchange.h"
#include "register_finite.h"
#include "register_modifiers.h"
#include "register_pages.h"
#include "register_product.h"
#include "register_tile.h"
#include "tile.h"

// What turns the scores of a strip into exponents of 2 and into natural ones.
struct ScoreUnits {
  float sign;    // 1 unless the scale is negative, or 0, and has not been applied yet
  float factor;  // c, positive: what the difference of two scores is multiplied with
  float scale;   // what makes a score natural
};

inline ScoreUnits score_units(float scale, float scale_log2e) {
  ScoreUnits units;
  units.sign = 1.0f;
  units.factor = M_LOG2E_F;
  units.scale = 1.0f;
  if (changes_scores()) return units;
  units.sign = scale < 0.0f ? -1.0f : (scale > 0.0f ? 1.0f : 0.0f);
  // With scale 0 all scores are 0 and any factor will do.
  units.factor = units.sign == 0.0f ? 1.0f : units.sign * scale_log2e;
  units.scale = units.sign * scale;
  return units;
}

// What a row has seen so far. A lane holds two elements of each of its fragments: lane_rows is 1
// where both are known to stand in one row. Sums stay per element until the end.
template <uint row_fragments, uint lane_rows>
struct SoftmaxState {
  float row_max[row_fragments][lane_rows];  // in the units of S
  float row_sum[row_fragments][2];
};

// sink: the head's extra logit, -INFINITY for none; it has a weight of 1 in column 0 of each row.
template <uint row_fragments, uint lane_rows>
void start_softmax(thread SoftmaxState<row_fragments, lane_rows>& state, float sink, float factor,
                   LaneMap map) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
    // Finite after the factor too, so that a hidden score less this maximum is -inf and not NaN.
#pragma clang loop unroll(full)
    for (uint e = 0; e < lane_rows; ++e) {
      state.row_max[r][e] = sink == -INFINITY ? -FLT_MAX / max(factor, 1.0f) : sink;
    }
    state.row_sum[r][0] = sink != -INFINITY && map.column0 == 0 ? 1.0f : 0.0f;
    state.row_sum[r][1] = sink != -INFINITY && map.column1 == 0 ? 1.0f : 0.0f;
  }
}

template <uint row_fragments, uint columns>
void scale_fragments(thread simdgroup_float8x8 (&S)[row_fragments][columns], float factor) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) scale_strip(S[r], factor);
}

// Raises the running maxima to those of S where they moved, and scales what was summed before.
template <uint exchange, uint row_fragments, uint lane_rows, uint columns, uint value_fragments>
void raise_maxima(thread SoftmaxState<row_fragments, lane_rows>& state,
                  thread simdgroup_float8x8 (&O)[row_fragments][value_fragments],
                  thread simdgroup_float8x8 (&S)[row_fragments][columns], float factor,
                  float max_slack, LaneMap map, threadgroup float* table, uint lane) {
  float block_max[row_fragments][2];
  bool moved = false;
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
    float max0 = S[r][0].thread_elements()[0];
    float max1 = S[r][0].thread_elements()[1];
#pragma clang loop unroll(full)
    for (uint j = 1; j < columns; ++j) {
      max0 = max(max0, S[r][j].thread_elements()[0]);
      max1 = max(max1, S[r][j].thread_elements()[1]);
    }
    block_max[r][0] = max0;
    block_max[r][1] = max1;
    moved = moved || (max0 - state.row_max[r][0]) * factor > max_slack ||
            (max1 - state.row_max[r][lane_rows - 1]) * factor > max_slack;
  }
  if (!simd_any(moved)) return;
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
    combine_rows<exchange>(block_max[r][0], block_max[r][1], map, table, lane, MaxOf());
    float correction[lane_rows];
#pragma clang loop unroll(full)
    for (uint e = 0; e < lane_rows; ++e) {
      const float before = state.row_max[r][e];
      const bool rises = (block_max[r][e] - before) * factor > max_slack;
      const float after = rises ? block_max[r][e] : before;
      correction[e] = fast::exp2((before - after) * factor);
      state.row_max[r][e] = after;
    }
    state.row_sum[r][0] *= correction[0];
    state.row_sum[r][1] *= correction[lane_rows - 1];
#pragma clang loop unroll(full)
    for (uint d = 0; d < value_fragments; ++d) {
      O[r][d].thread_elements()[0] *= correction[0];
      O[r][d].thread_elements()[1] *= correction[lane_rows - 1];
    }
  }
}

// 2^(factor (score - row_max)). Natural scores may be as large as float goes, so their difference
// is taken first; for products one fused instruction does it, with `shift` = -factor * row_max.
inline float weight_of(float score, float row_max, float shift, float factor) {
  if (changes_scores()) return fast::exp2((score - row_max) * factor);
  return fast::exp2(fma(score, factor, shift));
}

// S becomes P in place.
template <uint row_fragments, uint lane_rows, uint columns>
void exponentiate(thread simdgroup_float8x8 (&S)[row_fragments][columns],
                  thread SoftmaxState<row_fragments, lane_rows>& state, float factor) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
    const float max0 = state.row_max[r][0];
    const float max1 = state.row_max[r][lane_rows - 1];
#pragma clang loop unroll(full)
    for (uint j = 0; j < columns; ++j) {
      const float p0 = weight_of(S[r][j].thread_elements()[0], max0, -(max0 * factor), factor);
      const float p1 = weight_of(S[r][j].thread_elements()[1], max1, -(max1 * factor), factor);
      state.row_sum[r][0] += p0;
      state.row_sum[r][1] += p1;
      S[r][j].thread_elements()[0] = p0;
      S[r][j].thread_elements()[1] = p1;
    }
  }
}

// Log-sum-exp of a row. Where weights were taken from factor * row_max rounded, what that rounding
// added to their sum comes off again.
inline float row_lse(float row_max, float row_sum, ScoreUnits units) {
  if (row_sum == 0.0f) return -INFINITY;
  if (changes_scores()) return row_max + log(row_sum);
  const float rounding = fma(row_max, units.factor, -(row_max * units.factor));
  return fma(units.scale, row_max, log(row_sum) - rounding * M_LN2_F);
}

// query, key, value, out: (batch, row, head, dim) by params' strides; lse: (batch, head, row);
// status: one word; the options' arguments as modifiers.h says. held is head_tile / 8, or 1 where Q
// is read again for every block.
template <typename T, typename F, uint head_tile, uint value_tile, uint row_fragments, uint block_k,
          uint simdgroups, uint held, uint exchange>
[[kernel, max_total_threads_per_threadgroup(simdgroups * 32)]] void register_forward(
    device const T* query [[buffer(kBufferQuery)]], device const T* key [[buffer(kBufferKey)]],
    device const T* value [[buffer(kBufferValue)]], device T* out [[buffer(kBufferOut)]],
    device float* lse [[buffer(kBufferLse)]],
    device const RowInterval* row_intervals [[buffer(kBufferRowIntervals)]],
    constant AttentionParams& params [[buffer(kBufferParams)]],
    device atomic_uint* status [[buffer(kBufferStatus)]], FLASHATTN_MODIFIER_ARGUMENTS,
    device const float* sinks [[buffer(kBufferSinks), function_constant(has_sinks)]],
    FLASHATTN_ENTRY_ARGUMENT,
    device const uint* block_table [[buffer(kBufferBlockTable), function_constant(is_paged)]],
    uint threadgroup_index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr uint threads = simdgroups * kSimdWidth;
  constexpr uint columns = block_k / kFragment;
  constexpr uint own_rows = row_fragments * kFragment;
  constexpr uint block_q = simdgroups * own_rows;
  constexpr uint key_stride = padded<F>(head_tile);
  constexpr uint value_stride = padded<F>(value_tile);
  constexpr uint lane_rows = exchange == kExchangeApple ? 1 : 2;
  alignas(16) threadgroup F K[block_k * key_stride];
  alignas(16) threadgroup F V[block_k * value_stride];
  threadgroup float tables[simdgroups * kFragmentSize];
  threadgroup uint flags[simdgroups];

  LaneMap map;
  if (!learn_lane_map<exchange, threads>(map, K, (threadgroup float*)V, thread_index, lane)) {
    if (thread_index == 0) raise_status(status, kStatusLaneMap);
    return;
  }
  threadgroup float* table = tables + simdgroup * kFragmentSize;

  // Long causal rows first: row blocks count down, heads of one block are neighbours.
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
  const BlockRange own_keys = keys_of_block(interval, entry.seqlen_q, first_row, own_rows);

  device const T* Q_rows = query_pointer(query, params.query, entry, h, first_row);
  simdgroup_matrix<F, 8, 8> Q[row_fragments][held];
  simdgroup_float8x8 O[row_fragments][value_tile / kFragment];
  load_held<row_fragments, held, head_tile / kFragment>(Q, Q_rows, params.query, valid_rows,
                                                        params.head_dim, map);
  set_zero(O);
  const HeadModifiers head = head_modifiers(modifiers, mask, alibi_slopes, row_shifts, b, h);
  const ScoreUnits units = score_units(params.scale, params.scale_log2e);
  SoftmaxState<row_fragments, lane_rows> state;
  float sink = -INFINITY;
  if (has_sinks) sink = sinks[FLASHATTN_INT64(h) * modifiers->sinks_head];
  start_softmax(state, sink, units.factor, map);

  const KeyRows<T> K_head = key_rows(key, params.key, entry, block_table, kv_head);
  const KeyRows<T> V_head = key_rows(value, params.value, entry, block_table, kv_head);
  for (int j = block_keys.any.begin / int(block_k) * int(block_k); j < block_keys.any.end;
       j += int(block_k)) {
    if (!mask_shows(modifiers, mask_tiles, b, h, block * block_q, block_q, entry.seqlen_q, j)) {
      continue;  // the same for the whole threadgroup
    }
    const uint valid_keys = uint(min(int(block_k), interval.key_limit - j));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_key_tile<block_k, head_tile, key_stride, threads>(
        K, K_head, params.key, uint(j), valid_keys, params.head_dim, thread_index);
    stage_key_tile<block_k, value_tile, value_stride, threads>(
        V, V_head, params.value, uint(j), valid_keys, params.value_dim, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    bool poisoned = false;
    if (has_mask || !covers(block_keys.all, j, block_k)) {
      poisoned = must_select<threads>(
          share_is_non_finite<block_k, value_tile, value_stride, threads>(V, thread_index), status,
          flags, lane, simdgroup);
    }
    if (!poisoned &&
        (!overlaps(own_keys.any, j, block_k) ||
         !mask_shows(modifiers, mask_tiles, b, h, first_row, own_rows, entry.seqlen_q, j))) {
      continue;
    }

    simdgroup_float8x8 S[row_fragments][columns];
    multiply_by_transposed<head_tile / kFragment, key_stride>(S, Q, K, Q_rows, params.query,
                                                              valid_rows, params.head_dim, map);
    if (units.sign != 1.0f) scale_fragments(S, units.sign);
    uint visible[row_fragments];
    const bool masked = !covers(own_keys.all, j, block_k) || (changes_scores() && !full_rows);
#pragma clang loop unroll(full)
    for (uint r = 0; r < row_fragments; ++r) {
      const uint row = first_row + r * kFragment;
      visible[r] = kAllElements;
      if (masked) {
        visible[r] =
            elements_in<columns>(keys_of_row(interval, entry.seqlen_q, row + map.row0),
                                 keys_of_row(interval, entry.seqlen_q, row + map.row1), j, map);
      }
      if (changes_scores()) {
        modify_strip<false>(S[r], visible[r], head, params.scale, strip_place(row, uint(j), map));
      }
      if (masked || has_mask) fill_hidden(S[r], visible[r], -INFINITY);
    }
    raise_maxima<exchange>(state, O, S, units.factor, params.max_slack, map, table, lane);
    if (poisoned) {
#pragma clang loop unroll(full)
      for (uint r = 0; r < row_fragments; ++r) {
        const uint row0 = first_row + r * kFragment + map.row0;
        const uint row1 = first_row + r * kFragment + map.row1;
        add_non_finite<block_k, value_stride, false>(
            O[r],
            seen_keys<block_k>(keys_of_row(interval, entry.seqlen_q, row0), head, row0, uint(j)),
            seen_keys<block_k>(keys_of_row(interval, entry.seqlen_q, row1), head, row1, uint(j)), V,
            map);
      }
      drop_non_finite<block_k, value_tile, value_stride, threads>(V, thread_index);
    }
    exponentiate(S, state, units.factor);
    if (has_dropout) {
      drop_strips<false>(S, visible, head.dropout, strip_place(first_row, uint(j), map));
    }
    simdgroup_matrix<F, 8, 8> P[row_fragments][columns];
    to_factors(P, S);
    add_product<value_stride>(O, P, V);
  }

  device T* out_rows = query_pointer(out, params.out, entry, h, first_row);
  device float* lse_rows = lse + query_index(params.lse, entry, h, first_row);
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
    float sum0 = state.row_sum[r][0];
    float sum1 = state.row_sum[r][1];
    combine_rows<exchange>(sum0, sum1, map, table, lane, SumOf());
    const int rows_left = valid_rows - int(r * kFragment);
    // A row that saw no key has l = 0: its output is 0 and its log-sum-exp -inf.
    store_strip_rows(O[r], out_rows + FLASHATTN_INT64(r * kFragment) * params.out.row, params.out,
                     rows_left, params.value_dim, sum0 == 0.0f ? 0.0f : 1.0f / sum0,
                     sum1 == 0.0f ? 0.0f : 1.0f / sum1, false, map);
    // The lane that holds a row's first column writes its log-sum-exp.
    if (map.column0 == 0 && int(map.row0) < rows_left) {
      lse_rows[FLASHATTN_INT64(r * kFragment + map.row0) * params.lse.row] =
          row_lse(state.row_max[r][0], sum0, units);
    }
    if (map.column1 == 0 && int(map.row1) < rows_left) {
      lse_rows[FLASHATTN_INT64(r * kFragment + map.row1) * params.lse.row] =
          row_lse(state.row_max[r][lane_rows - 1], sum1, units);
    }
  }
}
