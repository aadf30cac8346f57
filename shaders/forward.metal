// Forward: out = softmax(scale * Q K^T) V and its log-sum-exp, one threadgroup per block_q query
// rows of one head. The `staged` design: K, V and the scores pass through threadgroup memory, so
// nothing depends on how a fragment's elements are spread over lanes. It relies on tile.h and
// modifiers.h.
//
//   for each block of block_k keys:
//     S = Q K^T                                   fragments, 8 rows per simdgroup
//     m' = max(m, rowmax(S));  P = exp2(c (S - m'))   four lanes per row, c = scale * log2(e)
//     l = l * exp2(c (m - m')) + rowsum(P)
//     O = diag(exp2(c (m - m'))) O + P V
//   O = diag(1 / l) O;  L = scale m + log l
// With a negative scale S and scale change their signs first. The difference S - m' is taken before
// it is scaled, so that the largest scores lose nothing to rounding. With an option that changes
// scores, S is in natural units instead, as modifiers.h makes it, and c = log2(e). A sink is where
// m and l start. Dropout multiplies P on its way to V and leaves l alone.
#include "modifiers.h"
#include "pages.h"
#include "tile.h"

// What turns the scores that softmax_step meets into exponents of 2.
struct ScoreUnits {
  float sign;    // -1 for a negative scale that has not been applied yet
  float factor;  // what the difference of two scores is multiplied with
  float scale;   // what makes a score natural
};

inline ScoreUnits score_units(float scale, float scale_log2e) {
  ScoreUnits units;
  units.sign = !changes_scores() && scale < 0.0f ? -1.0f : 1.0f;
  units.factor = changes_scores() ? M_LOG2E_F : units.sign * scale_log2e;
  units.scale = changes_scores() ? 1.0f : units.sign * scale;
  return units;
}

// Products of the lane's row become modified scores in place.
template <uint block_k>
void modify_row(threadgroup float* row_scores, thread const HeadModifiers& head, uint row,
                uint first_key, Range keys, float scale, uint quarter) {
  for (uint c = quarter; c < block_k; c += kLanesPerRow) {
    const int j = int(first_key + c);
    if (j >= keys.begin && j < keys.end) {
      row_scores[c] = modify_score(head, row_scores[c] * scale, row, uint(j)).value;
    }
  }
}

// Scores of the lane's row become weights in place; returns the factor of what was summed before.
// row_max and row_sum are the running m and l of the row, the same in its four lanes.
template <uint block_k>
float softmax_step(threadgroup float* row_scores, thread const HeadModifiers& head, uint row,
                   uint first_key, Range keys, ScoreUnits units, uint quarter,
                   thread float& row_max, thread float& row_sum) {
  const float sign = units.sign;
  float block_max = row_max;
  for (uint c = quarter; c < block_k; c += kLanesPerRow) {
    const int j = int(first_key + c);
    if (j >= keys.begin && j < keys.end) block_max = max(block_max, sign * row_scores[c]);
  }
  block_max = row_max4(block_max);
  float block_sum = 0.0f;
  for (uint c = quarter; c < block_k; c += kLanesPerRow) {
    const int j = int(first_key + c);
    float p = 0.0f;
    if (j >= keys.begin && j < keys.end) {
      p = exp2((sign * row_scores[c] - block_max) * units.factor);
    }
    block_sum += p;
    if (has_dropout && p != 0.0f) p *= dropout_factor(head.dropout, row, uint(j));
    row_scores[c] = p;
  }
  const float correction = exp2((row_max - block_max) * units.factor);
  row_sum = row_sum * correction + row_sum4(block_sum);
  row_max = block_max;
  return correction;
}

// query, key, value, out: (batch, row, head, dim) by params' strides; lse: (batch, head, row); the
// options' arguments as modifiers.h says.
template <typename T, uint head_tile, uint value_tile, uint block_q, uint block_k>
[[kernel]] void forward(
    device const T* query [[buffer(kBufferQuery)]], device const T* key [[buffer(kBufferKey)]],
    device const T* value [[buffer(kBufferValue)]], device T* out [[buffer(kBufferOut)]],
    device float* lse [[buffer(kBufferLse)]],
    device const RowInterval* row_intervals [[buffer(kBufferRowIntervals)]],
    constant AttentionParams& params [[buffer(kBufferParams)]], FLASHATTN_MODIFIER_ARGUMENTS,
    device const float* sinks [[buffer(kBufferSinks), function_constant(has_sinks)]],
    FLASHATTN_ENTRY_ARGUMENT,
    device const uint* block_table [[buffer(kBufferBlockTable), function_constant(is_paged)]],
    uint threadgroup_index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr uint threads = block_q / kFragment * kSimdWidth;
  constexpr uint key_stride = head_tile + kPadding;
  constexpr uint value_stride = value_tile + kPadding;
  constexpr uint score_stride = block_k + kPadding;
  // One arena: first Q, then a K and a V tile per block, at last the output on its way to device
  // memory.
  threadgroup float
      arena[max3(block_k * (key_stride + value_stride), block_q * head_tile, block_q * value_tile)];
  threadgroup float scores[block_q * score_stride];
  threadgroup float scratch[block_q / kFragment * kFragmentSize];
  threadgroup uint visible[block_q];
  threadgroup uint non_finite[block_q / kFragment];

  // Long causal rows first: row blocks count down, heads of one block are neighbours.
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
  threadgroup float* own_scratch = scratch + simdgroup * kFragmentSize;
  threadgroup uint* own_visible = visible + simdgroup * kFragment;
  const LaneRow at = lane_row(lane);
  const RowInterval interval = row_intervals[b];
  const uint row = first_row + simdgroup * kFragment + at.row;
  const Range keys = keys_of_row(interval, entry.seqlen_q, row);
  HeadModifiers head = head_modifiers(modifiers, mask, alibi_slopes, row_shifts, b, h);
  if (has_mask) head.mask_first += FLASHATTN_INT64(entry.key_row) * head.mask_key;
  const Range block_keys = keys_of_rows(interval, entry.seqlen_q, first_row, block_q);

  simdgroup_float8x8 Q[head_tile / kFragment];
  simdgroup_float8x8 O[value_tile / kFragment];
  stage_rows<block_q, head_tile, threads>(arena, head_tile,
                                          query_pointer(query, params.query, entry, h, first_row),
                                          params.query, valid_rows, params.head_dim, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  load_strip(Q, arena + simdgroup * kFragment * head_tile, head_tile);
  fill_zero(O);

  const ScoreUnits units = score_units(params.scale, params.scale_log2e);
  float row_max = -FLT_MAX;
  float row_sum = 0.0f;
  if (has_sinks) {
    const float sink = sinks[FLASHATTN_INT64(h) * modifiers->sinks_head];
    row_max = sink == -INFINITY ? row_max : sink;
    row_sum = sink == -INFINITY ? row_sum : 1.0f;
  }
  threadgroup float* K = arena;
  threadgroup float* V = arena + block_k * key_stride;
  for (uint j = uint(block_keys.begin) / block_k * block_k; int(j) < block_keys.end; j += block_k) {
    if (has_mask && mask_tile_class(modifiers, mask_tiles, b, h, first_row, j) == kMaskTileNone) {
      continue;
    }
    const uint valid_keys = min(block_k, uint(interval.key_limit) - j);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_keys<block_k, head_tile, threads>(K, key_stride, key, params.key, entry, block_table,
                                            kv_head, j, valid_keys, params.head_dim, thread_index);
    const bool bad = stage_keys<block_k, value_tile, threads>(
        V, value_stride, value, params.value, entry, block_table, kv_head, j, valid_keys,
        params.value_dim, thread_index);
    const bool any_bad = simd_any(bad);
    if (lane == 0) non_finite[simdgroup] = any_bad ? 1u : 0u;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint poisoned = 0;
    for (uint s = 0; s < block_q / kFragment; ++s) poisoned |= non_finite[s];

    simdgroup_float8x8 S[block_k / kFragment];
    multiply_transposed(S, Q, K, key_stride);
    store_strip(S, own_scores, score_stride);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup float* row_scores = own_scores + at.row * score_stride;
    if (changes_scores()) {
      modify_row<block_k>(row_scores, head, row, j, keys, params.scale, at.quarter);
    }
    const float correction =
        softmax_step<block_k>(row_scores, head, row, j, keys, units, at.quarter, row_max, row_sum);
    scale_rows(O, correction, own_scratch, lane);
    if (poisoned == 0u) {
      multiply_accumulate<block_k / kFragment>(O, own_scores, score_stride, V, value_stride);
    } else {
      if (at.quarter == 0) {
        own_visible[at.row] = unmasked_keys<block_k>(columns_in<block_k>(keys, j), head, row, j);
      }
      accumulate_selected<block_k / kFragment>(O, own_scores, score_stride, V, value_stride,
                                               own_visible, own_scratch, lane);
    }
  }

  // A row that saw no key has l = 0: its output is 0 and its log-sum-exp -inf.
  const bool dead = row_sum == 0.0f;
  scale_rows(O, dead ? 0.0f : 1.0f / row_sum, own_scratch, lane);
  if (at.quarter == 0 && row < entry.seqlen_q) {
    lse[query_index(params.lse, entry, h, row)] =
        dead ? -INFINITY : fma(units.scale, row_max, log(row_sum));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store_strip(O, arena + simdgroup * kFragment * value_tile, value_tile);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  write_rows<block_q, value_tile, threads>(query_pointer(out, params.out, entry, h, first_row),
                                           params.out, arena, value_tile, valid_rows,
                                           params.value_dim, false, thread_index);
}
