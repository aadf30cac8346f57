// Backward, mask side: dmask, one threadgroup per block_q x block_k tile of the mask's own shape.
// The mask's tile is added to one tile of scores, or along the axes it is broadcast over to many:
// their gradients are computed again and summed in a fixed order, so that nothing quadratic is
// stored and no atomics are needed.
//
//   for each tile of scores that the tile of the mask is added to, keys fastest, then rows, heads,
//   batch entries:
//     S = Q K^T;  dP = dO V^T
//     dmask += exp(S - L) * (R dP - delta)      four lanes per row
//   dmask summed over the tile's rows and keys, where the mask has one of them
#include "modifiers.h"
#include "tile.h"

// How many tiles of scores there are along each axis, and which one this is.
struct TileCounter {
  uint key_tiles;
  uint row_tiles;
  uint heads;
  uint key_tile;
  uint row_tile;
  uint head;
  uint batch;
};

// Axes along which the mask is not broadcast count as one.
template <uint block_q, uint block_k>
TileCounter tile_counter(constant AttentionParams& params, constant ModifierParams* modifiers) {
  TileCounter at;
  at.key_tiles = modifiers->mask_keys == 1 ? (params.seqlen_k + block_k - 1) / block_k : 1u;
  at.row_tiles = modifiers->mask_rows == 1 ? (params.seqlen_q + block_q - 1) / block_q : 1u;
  at.heads = modifiers->mask_heads == 1 ? params.query_heads : 1u;
  FLASHATTN_UINT64 rest = modifiers->first_tile;
  at.key_tile = uint(rest % at.key_tiles);
  rest /= at.key_tiles;
  at.row_tile = uint(rest % at.row_tiles);
  rest /= at.row_tiles;
  at.head = uint(rest % at.heads);
  at.batch = uint(rest / at.heads);
  return at;
}

inline void next_tile(thread TileCounter& at) {
  if (++at.key_tile < at.key_tiles) return;
  at.key_tile = 0;
  if (++at.row_tile < at.row_tiles) return;
  at.row_tile = 0;
  if (++at.head < at.heads) return;
  at.head = 0;
  ++at.batch;
}

// The tile of the mask that a threadgroup owns: 0 along an axis that the mask is broadcast over.
struct MaskTile {
  uint batch;
  uint head;
  uint first_row;
  uint first_key;
};

template <uint block_q, uint block_k>
MaskTile mask_tile(constant ModifierParams* modifiers, uint task) {
  const uint key_tiles = (modifiers->mask_keys + block_k - 1) / block_k;
  const uint row_tiles = (modifiers->mask_rows + block_q - 1) / block_q;
  MaskTile tile;
  tile.first_key = task % key_tiles * block_k;
  tile.first_row = task / key_tiles % row_tiles * block_q;
  tile.head = task / key_tiles / row_tiles % modifiers->mask_heads;
  tile.batch = task / key_tiles / row_tiles / modifiers->mask_heads;
  return tile;
}

// Writes the tile's sums, over all of its rows or keys where the mask has one, or adds them to what
// an earlier dispatch left.
template <uint block_q, uint block_k, uint threads>
void write_mask_tile(device float* dmask, constant ModifierParams* modifiers, MaskTile tile,
                     threadgroup const float* totals, uint stride, uint thread_index) {
  const uint rows = modifiers->mask_rows == 1 ? 1u : block_q;
  const uint keys = modifiers->mask_keys == 1 ? 1u : block_k;
  for (uint e = thread_index; e < rows * keys; e += threads) {
    const uint r = e / keys;
    const uint c = e % keys;
    if (tile.first_row + r >= modifiers->mask_rows || tile.first_key + c >= modifiers->mask_keys) {
      continue;
    }
    float sum = 0.0f;
    for (uint i = r; i < block_q; i += rows) {
      float row_sum = 0.0f;
      for (uint j = c; j < block_k; j += keys) row_sum += totals[i * stride + j];
      sum += row_sum;
    }
    device float* at = dmask + FLASHATTN_INT64(tile.batch) * modifiers->dmask.batch +
                       FLASHATTN_INT64(tile.head) * modifiers->dmask.head +
                       FLASHATTN_INT64(tile.first_row + r) * modifiers->dmask.row +
                       FLASHATTN_INT64(tile.first_key + c) * modifiers->dmask.key;
    if (modifiers->first_tile != 0) sum += *at;
    *at = sum;
  }
}

// Tensors: (batch, row, head, dim) by params' strides; lse: (batch, head, row); delta: contiguous
// (batch, query_heads, seqlen_q); dmask: (batch, head, row, key) by modifiers' strides; the
// options' arguments as modifiers.h says.
template <typename T, uint head_tile, uint value_tile, uint block_q, uint block_k>
[[kernel]] void mask_gradient(
    device const T* query [[buffer(kBufferQuery)]], device const T* key [[buffer(kBufferKey)]],
    device const T* value [[buffer(kBufferValue)]], device const float* lse [[buffer(kBufferLse)]],
    device const T* dout [[buffer(kBufferDout)]],
    device const float* delta [[buffer(kBufferDelta)]],
    device const RowInterval* row_intervals [[buffer(kBufferRowIntervals)]],
    constant AttentionParams& params [[buffer(kBufferParams)]], FLASHATTN_MODIFIER_ARGUMENTS,
    device float* dmask [[buffer(kBufferDmask)]],
    uint threadgroup_index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr uint threads = block_q / kFragment * kSimdWidth;
  constexpr uint key_stride = head_tile + kPadding;
  constexpr uint value_stride = value_tile + kPadding;
  constexpr uint score_stride = block_k + kPadding;
  constexpr uint columns = block_k / kLanesPerRow;
  threadgroup float
      arena[max3(block_k * (key_stride + value_stride), block_q * head_tile, block_q * value_tile)];
  threadgroup float scores[block_q * score_stride];
  threadgroup float dp[block_q * score_stride];

  const uint task = params.first_threadgroup + threadgroup_index;
  const MaskTile own = mask_tile<block_q, block_k>(modifiers, task);
  TileCounter tile = tile_counter<block_q, block_k>(params, modifiers);
  const float scale = pair_scale(params.scale, params.scale_log2e);
  const LaneRow at = lane_row(lane);
  threadgroup float* own_scores = scores + simdgroup * kFragment * score_stride;
  threadgroup float* own_dp = dp + simdgroup * kFragment * score_stride;
  threadgroup float* K = arena;
  threadgroup float* V = arena + block_k * key_stride;
  simdgroup_float8x8 Q[head_tile / kFragment];
  simdgroup_float8x8 dO[value_tile / kFragment];
  float total[columns];
#pragma clang loop unroll(full)
  for (uint t = 0; t < columns; ++t) total[t] = 0.0f;

  for (uint n = 0; n < modifiers->tile_count; ++n, next_tile(tile)) {
    const uint b = own.batch + tile.batch;
    const uint h = own.head + tile.head;
    const uint first_row = own.first_row + tile.row_tile * block_q;
    const uint first_key = own.first_key + tile.key_tile * block_k;
    const RowInterval interval = row_intervals[b];
    const Range block_keys = keys_of_rows(interval, params.seqlen_q, first_row, block_q);
    if (int(first_key) >= block_keys.end || int(first_key + block_k) <= block_keys.begin) continue;
    if (mask_tile_class(modifiers, mask_tiles, b, h, first_row, first_key) == kMaskTileNone) {
      continue;
    }
    const uint kv_head = h / params.heads_per_kv;
    const uint valid_rows = min(block_q, params.seqlen_q - first_row);
    const uint valid_keys = min(block_k, uint(interval.key_limit) - first_key);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_rows<block_q, head_tile, threads>(
        arena, head_tile, row_pointer(query, params.query, b, h, first_row), params.query,
        valid_rows, params.head_dim, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_strip(Q, arena + simdgroup * kFragment * head_tile, head_tile);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_rows<block_q, value_tile, threads>(
        arena, value_tile, row_pointer(dout, params.dout, b, h, first_row), params.dout, valid_rows,
        params.value_dim, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_strip(dO, arena + simdgroup * kFragment * value_tile, value_tile);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_rows<block_k, head_tile, threads>(K, key_stride,
                                            row_pointer(key, params.key, b, kv_head, first_key),
                                            params.key, valid_keys, params.head_dim, thread_index);
    stage_rows<block_k, value_tile, threads>(
        V, value_stride, row_pointer(value, params.value, b, kv_head, first_key), params.value,
        valid_keys, params.value_dim, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    simdgroup_float8x8 S[block_k / kFragment];
    multiply_transposed(S, Q, K, key_stride);
    store_strip(S, own_scores, score_stride);
    multiply_transposed(S, dO, V, value_stride);
    store_strip(S, own_dp, score_stride);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const HeadModifiers head = head_modifiers(modifiers, mask, alibi_slopes, row_shifts, b, h);
    const uint i = first_row + simdgroup * kFragment + at.row;
    Range keys = keys_of_row(interval, params.seqlen_q, i);
    float row_lse = 0.0f;
    float row_delta = 0.0f;
    if (i < params.seqlen_q) {
      row_lse = exponent_of_lse(lse[scalar_index(params.lse, b, h, i)]);
      row_delta = delta[(FLASHATTN_INT64(b) * params.query_heads + h) * params.seqlen_q + i];
    }
    if (row_lse == -INFINITY) keys.end = 0;  // a row without weights has no gradient
#pragma clang loop unroll(full)
    for (uint t = 0; t < columns; ++t) {
      const uint c = t * kLanesPerRow + at.quarter;
      const int j = int(first_key + c);
      if (j < keys.begin || j >= keys.end) continue;
      const uint e = at.row * score_stride + c;
      const PairWeight weight = pair_weight(head, own_scores[e], scale, row_lse, i, uint(j));
      total[t] += score_gradient(head, weight, own_dp[e], row_delta, i, uint(j));
    }
  }

#pragma clang loop unroll(full)
  for (uint t = 0; t < columns; ++t) {
    own_scores[at.row * score_stride + t * kLanesPerRow + at.quarter] = total[t];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  write_mask_tile<block_q, block_k, threads>(dmask, modifiers, own, scores, score_stride,
                                             thread_index);
}
