// Forward: out = softmax(scale * Q K^T) V and its log-sum-exp, scores in registers. A simdgroup
// owns 8 * row_fragments query rows for the whole kernel: Q, O and each row's running maximum and
// sum; S and P never leave it. K and V pass through threadgroup memory, two barriers a block.
//
//   for each block of block_k keys:
//     S = Q K^T                                           fragments
//     m' = max(m, rowmax(S)) where that rises by more than max_slack, else m     (per row)
//     P = exp2(c (S - m'));  l = l * exp2(c (m - m')) + P per lane;  O likewise + P V
//   l = rowsum(l);  O = diag(1 / l) O;  L = scale m + log l
// c = |scale| * log2(e); with a negative scale S changes its sign. With an option that changes
// scores, S is in natural units instead, as modifiers.h makes it, and c = log2(e). A sink is where
// m and l start. Dropout multiplies P on its way to V and leaves l alone.
//
// Lanes exchange maxima only when a vote says that some row of theirs rose, and sums once, at the
// end. Whether a row's maximum moves depends on that row alone, so its bits do not depend on its
// neighbours. With max_slack = 0 this is the exact online softmax; otherwise P may grow to
// 2^max_slack, which float does not notice.
//
// Few rows leave most of a GPU idle: their keys are split into chunks of params.chunk_keys, each
// with a threadgroup of its own, whose simdgroups take the heads that share the keys. What a chunk
// comes to - m, l and O as they stand after its last block - goes to merge_chunks.metal.
#include "block_ranges.h"
#include "register_finite.h"
#include "register_modifiers.h"
#include "register_pages.h"
#include "register_product.h"
#include "register_softmax.h"
#include "register_tile.h"
#include "tile.h"

constant bool is_split [[function_constant(kConstantIsSplit)]];

// Which rows of which head a simdgroup computes, and with which keys.
struct ForwardTask {
  uint b;
  uint h;
  uint kv_head;
  uint block_row;  // first row of the threadgroup
  uint first_row;  // and of the simdgroup; past the end where it has nothing to do
  uint chunk;      // of the keys; 0 in a call that is not split
};

template <uint own_rows, uint simdgroups>
ForwardTask forward_task(constant AttentionParams& params, uint threadgroup_index, uint simdgroup) {
  ForwardTask at;
  const uint task = params.first_threadgroup + threadgroup_index;
  if (is_split) {
    const uint groups = (params.heads_per_kv + simdgroups - 1) / simdgroups;
    const uint head_tasks = params.batch * params.kv_heads * groups;
    const uint g = task % groups * simdgroups + simdgroup;
    at.chunk = task / head_tasks;
    at.b = task % head_tasks / groups / params.kv_heads;
    at.kv_head = task / groups % params.kv_heads;
    at.h = at.kv_head * params.heads_per_kv + min(g, params.heads_per_kv - 1);
    at.block_row = 0;
    at.first_row = g < params.heads_per_kv ? 0 : own_rows;
    return at;
  }
  // Long causal rows first: row blocks count down, heads of one block are neighbours.
  const uint head_tasks = params.batch * params.query_heads;
  const uint block = params.first_block + params.blocks - 1 - task / head_tasks;
  at.b = task % head_tasks / params.query_heads;
  at.h = task % params.query_heads;
  at.kv_head = at.h / params.heads_per_kv;
  at.block_row = block * simdgroups * own_rows;
  at.first_row = at.block_row + simdgroup * own_rows;
  at.chunk = 0;
  return at;
}

inline void store_state(device float* target, float row_max, float row_sum) {
  target[0] = row_max;
  target[1] = row_sum;
}

// Whether another dispatch of a ragged call computes the entry, or none does.
inline bool is_elsewhere(constant AttentionParams& params, EntryRows entry, uint block_row) {
  if (!is_ragged) return false;
  return block_row >= entry.seqlen_q || (entry.seqlen_q <= params.few_rows) != is_split;
}

// query, key, value, out: (batch, row, head, dim) by params' strides; lse: (batch, head, row); of a
// split call, partial_out: (batch, query_heads, few_rows, chunks, value_dim), partial_state: the
// same with maximum and sum in place of value_dim; status: one word; the options' arguments as
// modifiers.h says. held is head_tile / 8, or 1 where Q is read again for every block.
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
    device float* partial_out [[buffer(kBufferPartialOut), function_constant(is_split)]],
    device float* partial_state [[buffer(kBufferPartialState), function_constant(is_split)]],
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

  const ForwardTask at = forward_task<own_rows, simdgroups>(params, threadgroup_index, simdgroup);
  const uint b = at.b;
  const uint h = at.h;
  const uint first_row = at.first_row;
  const EntryRows entry = entry_rows(params, entries, b);
  if (is_elsewhere(params, entry, at.block_row)) return;
  const int valid_rows = int(entry.seqlen_q) - int(first_row);
  const RowInterval interval = row_intervals[b];
  BlockRange block_keys = keys_of_block(interval, entry.seqlen_q, at.block_row, block_q);
  if (is_split) {
    const int first_key = int(at.chunk * params.chunk_keys);
    block_keys.any.begin = max(block_keys.any.begin, first_key);
    block_keys.any.end = min(block_keys.any.end, first_key + int(params.chunk_keys));
  }
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
  if (has_sinks && at.chunk == 0) sink = sinks[FLASHATTN_INT64(h) * modifiers->sinks_head];
  start_softmax(state, sink, map);

  const KeyRows<T> K_head = key_rows(key, params.key, entry, block_table, at.kv_head);
  const KeyRows<T> V_head = key_rows(value, params.value, entry, block_table, at.kv_head);
  for (int j = block_keys.any.begin / int(block_k) * int(block_k); j < block_keys.any.end;
       j += int(block_k)) {
    // Heads of one threadgroup differ; otherwise this is the same for all of it.
    if (!is_split &&
        !mask_shows(modifiers, mask_tiles, b, h, at.block_row, block_q, entry.seqlen_q, j)) {
      continue;
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
    const float max0 = state.row_max[r][0];
    const float max1 = state.row_max[r][lane_rows - 1];
    const int rows_left = valid_rows - int(r * kFragment);
    // The lane that holds a row's first column writes what there is one of.
    const bool writes0 = map.column0 == 0 && int(map.row0) < rows_left;
    const bool writes1 = map.column1 == 0 && int(map.row1) < rows_left;
    if (is_split) {
      const FLASHATTN_INT64 part =
          partial_index(params, b, h, first_row + r * kFragment) + at.chunk;
      TensorStrides strides;
      strides.row = FLASHATTN_INT64(params.chunks) * params.value_dim;
      strides.dim = 1;
      store_strip_rows(O[r], partial_out + part * params.value_dim, strides, rows_left,
                       params.value_dim, 1.0f, 1.0f, false, map);
      device float* states = partial_state + 2 * part;
      if (writes0) store_state(states + 2 * (map.row0 * params.chunks), max0, sum0);
      if (writes1) store_state(states + 2 * (map.row1 * params.chunks), max1, sum1);
      continue;
    }
    // A row that saw no key has l = 0: its output is 0 and its log-sum-exp -inf.
    store_strip_rows(O[r], out_rows + FLASHATTN_INT64(r * kFragment) * params.out.row, params.out,
                     rows_left, params.value_dim, sum0 == 0.0f ? 0.0f : 1.0f / sum0,
                     sum1 == 0.0f ? 0.0f : 1.0f / sum1, false, map);
    const FLASHATTN_INT64 first = FLASHATTN_INT64(r * kFragment) * params.lse.row;
    if (writes0) lse_rows[first + map.row0 * params.lse.row] = row_lse(max0, sum0, units);
    if (writes1) lse_rows[first + map.row1 * params.lse.row] = row_lse(max1, sum1, units);
  }
}
