// Decode of one kv head: the online softmax, and the rows of a head against a block of keys. A row
// takes part in a tile with exactly the keys it sees, so nothing behind a length or outside of a
// window can reach it. Relies on decode_tile.h for the products.
#pragma once

#include "cpu/decode_tile.h"
#include "cpu/math.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// What the rows of one kv head share while a block of keys is worked on.
struct DecodeHead {
  // [rows][q_stride]: float32 in tailed order, or the bf16 elements as they are.
  const float* q = nullptr;
  bool q_in_pairs = false;
  std::int64_t q_stride = 0;
  TailedDim head_dim{};
  TailedDim value_dim{};
  float log2_scale = 0.0F;  // scale * log2(e)
  DecodePartial partial{};  // of this head's first row
  std::int64_t acc_stride = 0;
};

// Lane i of the result is lane i + by, around the end.
template <int by, int... lane>
FLASHATTN_INLINE Vec rotated(Vec x, LaneList<lane...>) {
  return __builtin_shufflevector(x, x, ((lane + by) % kLanes)...);
}

// The largest lane; a NaN lane may or may not count.
template <int by = kLanes / 2>
FLASHATTN_INLINE float largest_lane(Vec x) {
  const Vec folded = max(x, rotated<by>(x, AllLanes{}));
  if constexpr (by == 1) return folded[0];
  if constexpr (by > 1) return largest_lane<by / 2>(folded);
}

template <int by = kLanes / 2>
FLASHATTN_INLINE float lane_sum(Vec x) {
  const Vec folded = x + rotated<by>(x, AllLanes{});
  if constexpr (by == 1) return folded[0];
  if constexpr (by > 1) return lane_sum<by / 2>(folded);
}

FLASHATTN_INLINE float exp2_of(float x) { return exp2<6>(broadcast(x))[0]; }

// The online softmax of one row: s[0..count) are scores in and weights 2^(s - max) out. The running
// sum and accumulator are rescaled when the max moves. A NaN score makes the row's sum NaN.
FLASHATTN_INLINE void decode_softmax(float* s, std::int64_t count, float* max_log2, float* sum,
                                     float* acc, std::int64_t acc_floats) {
  Vec largest = broadcast(-kInfinity);
  for (std::int64_t k = 0; k < count; k += kLanes) largest = max(largest, load(s + k));
  const float block_max = largest_lane(largest);
  if (!(block_max <= *max_log2)) {
    const float factor = exp2_of(*max_log2 - block_max);
    *sum *= factor;
    const Vec factors = broadcast(factor);
    for (std::int64_t d = 0; d < acc_floats; d += kLanes) store(acc + d, load(acc + d) * factors);
    *max_log2 = block_max;
  }
  // With every score -inf the weights are 2^-inf = 0 and not 2^NaN.
  const Vec base = broadcast(*max_log2 == -kInfinity ? 0.0F : *max_log2);
  Vec total{};
  for (std::int64_t k = 0; k < count; k += kLanes) {
    const Vec p = exp2<6>(load(s + k) - base);
    total += p;
    store(s + k, p);
  }
  *sum += lane_sum(total);
}

// Rows [row, row + rows) of a head against `count` keys that all of them see.
template <DType dtype, int rows>
FLASHATTN_NOINLINE void decode_block(const DecodeHead& head, std::int64_t row, const TileRows& keys,
                                     const TileRows& values, std::int64_t count) {
  alignas(64) float s[rows][kDecodeBlockKeys];
  float* acc = head.partial.acc + row * head.acc_stride;
  const float* q = head.q + row * head.q_stride;
#if defined(FLASHATTN_HAS_BF16_DOT)
  if (dtype == DType::kBFloat16 && head.q_in_pairs) {
    decode_scores<PairDot, rows>(q, head.q_stride, head.head_dim, head.log2_scale, keys, count, s);
  } else
#endif
  {
    decode_scores<WidenedDot<dtype>, rows>(q, head.q_stride, head.head_dim, head.log2_scale, keys,
                                           count, s);
  }
  for (int r = 0; r < rows; ++r) {
    decode_softmax(s[r], count, head.partial.max_log2 + row + r, head.partial.sum + row + r,
                   acc + r * head.acc_stride, head.acc_stride);
  }
  decode_accumulate<dtype, rows>(s, values, count, head.value_dim, acc, head.acc_stride);
}

FLASHATTN_INLINE TileRows skip_rows(TileRows rows, std::int64_t count) {
  rows.base += count * rows.row_bytes;
  return rows;
}

FLASHATTN_INLINE Interval clipped(Interval keys, Interval to) {
  const std::int64_t begin = keys.begin > to.begin ? keys.begin : to.begin;
  const std::int64_t end = keys.end < to.end ? keys.end : to.end;
  return {begin, end > begin ? end : begin};
}

// All rows of a head against keys [block.begin, block.end), whose rows start at keys.base and
// values.base.
template <DType dtype>
FLASHATTN_INLINE void decode_head_block(const AttentionJob& job, std::int64_t batch,
                                        const DecodeHead& head, Interval block, TileRows keys,
                                        TileRows values) {
  const Visibility& visibility = job.visibility[batch];
  const std::int64_t rows = job.heads_per_kv * job.seqlen_q;
  const bool all_seen =
      visibility.tile(0, job.seqlen_q, block.begin, block.end) == TileVisibility::kAll;
  const auto keys_seen = [&](std::int64_t row) {
    return all_seen ? block : clipped(visibility.keys_of_row(row % job.seqlen_q), block);
  };
  // Rows r and r + 1 usually see the same keys of the block and share a tile; where the end of a
  // window or of the causal triangle passes between them they do not.
  std::int64_t row = 0;
  while (row < rows) {
    const Interval seen = keys_seen(row);
    std::int64_t alike = 1;
    for (; alike < 4 && row + alike < rows; ++alike) {
      const Interval next = keys_seen(row + alike);
      if (next.begin != seen.begin || next.end != seen.end) break;
    }
    const std::int64_t count = seen.end - seen.begin;
    const std::int64_t tile = alike == 4 ? 4 : alike >= 2 ? 2 : 1;
    if (count > 0) {
      const TileRows k = skip_rows(keys, seen.begin - block.begin);
      const TileRows v = skip_rows(values, seen.begin - block.begin);
      if (tile == 4) decode_block<dtype, 4>(head, row, k, v, count);
      if (tile == 2) decode_block<dtype, 2>(head, row, k, v, count);
      if (tile == 1) decode_block<dtype, 1>(head, row, k, v, count);
      // The other rows of the head find what was fetched.
      keys.ahead = 0;
      values.ahead = 0;
    }
    row += tile;
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
