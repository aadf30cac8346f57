// Decode of one kv head: the online softmax, and the rows of a head against a block of keys. A row
// takes part in a tile with exactly the keys it sees, so nothing behind a length or outside of a
// window can reach it. Relies on decode_tile.h for the products.
#pragma once

#include "cpu/decode_modified.h"
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
  // What products are multiplied by: scale * log2(e); with modifiers scale, or 1 under a softcap.
  float score_scale = 0.0F;
  DecodePartial partial{};  // of this head's first row
  std::int64_t acc_stride = 0;
  std::int64_t kv_head = 0;
  const DecodeModifiers* modifiers = nullptr;  // null for the plain kernels
};

// Row `row` of a kv head as a query head's row.
FLASHATTN_INLINE LanePlace decode_place(const AttentionJob& job, std::int64_t kv_head,
                                        std::int64_t row) {
  return {.head = kv_head * job.heads_per_kv + row / job.seqlen_q, .row = row % job.seqlen_q};
}

// What a difference of scores is multiplied by to be an exponent of 2.
template <bool modified>
constexpr float kScoreUnit = modified ? kLog2E : 1.0F;

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

// The online softmax of one row: s[0..count) are scores in and weights exp(s - max) out. The
// running sum and accumulator are rescaled when the max moves. A NaN score makes the row's sum NaN.
template <bool modified>
FLASHATTN_INLINE void decode_softmax(float* s, std::int64_t count, float* row_max, float* row_sum,
                                     float* acc, std::int64_t acc_floats) {
  constexpr float kUnit = kScoreUnit<modified>;
  Vec largest = broadcast(-kInfinity);
  for (std::int64_t k = 0; k < count; k += kLanes) largest = max(largest, load(s + k));
  const float block_max = largest_lane(largest);
  if (!(block_max <= *row_max)) {
    const float factor = exp2_of((*row_max - block_max) * kUnit);
    *row_sum *= factor;
    const Vec factors = broadcast(factor);
    for (std::int64_t d = 0; d < acc_floats; d += kLanes) store(acc + d, load(acc + d) * factors);
    *row_max = block_max;
  }
  // With every score -inf the weights are 2^-inf = 0 and not 2^NaN.
  const Vec base = broadcast(*row_max == -kInfinity ? 0.0F : *row_max);
  Vec total{};
  for (std::int64_t k = 0; k < count; k += kLanes) {
    const Vec p = exp2<6>((load(s + k) - base) * kUnit);
    total += p;
    store(s + k, p);
  }
  *row_sum += lane_sum(total);
}

FLASHATTN_INLINE TileRows skip_rows(TileRows rows, std::int64_t count) {
  rows.base += count * rows.row_bytes;
  return rows;
}

// scores[r] of `rows` rows of q.
template <DType dtype, int rows>
FLASHATTN_INLINE void decode_head_scores(const DecodeHead& head, std::int64_t row,
                                         const TileRows& keys, std::int64_t count,
                                         float (&s)[rows][kDecodeBlockKeys]) {
  const float* q = head.q + row * head.q_stride;
#if defined(FLASHATTN_HAS_BF16_DOT)
  if (dtype == DType::kBFloat16 && head.q_in_pairs) {
    decode_scores<PairDot, rows>(q, head.q_stride, head.head_dim, head.score_scale, keys, count, s);
    return;
  }
#endif
  decode_scores<WidenedDot<dtype>, rows>(q, head.q_stride, head.head_dim, head.score_scale, keys,
                                         count, s);
}

// Rows [row, row + rows) of a head against `count` keys that all of them see.
template <DType dtype, int rows>
FLASHATTN_NOINLINE void decode_block(const DecodeHead& head, std::int64_t row, std::int64_t,
                                     const TileRows& keys, const TileRows& values,
                                     std::int64_t count) {
  alignas(64) float s[rows][kDecodeBlockKeys];
  float* acc = head.partial.acc + row * head.acc_stride;
  decode_head_scores<dtype, rows>(head, row, keys, count, s);
  for (int r = 0; r < rows; ++r) {
    decode_softmax<false>(s[r], count, head.partial.max + row + r, head.partial.sum + row + r,
                          acc + r * head.acc_stride, head.acc_stride);
  }
  decode_accumulate<dtype, rows>(s, values, count, head.value_dim, acc, head.acc_stride);
}

// The same with modifiers. `key` is the first of the keys.
template <DType dtype, int rows>
FLASHATTN_NOINLINE void decode_modified_block(const DecodeHead& head, std::int64_t row,
                                              std::int64_t key, const TileRows& keys,
                                              const TileRows& values, std::int64_t count) {
  const DecodeModifiers& m = *head.modifiers;
  const bool masked = m.job->mask.data != nullptr;
  DecodeBias bias[rows];
  DecodeRowKeys at[rows];
  std::uint64_t hidden_from_all = all_keys(count);
  std::uint64_t hidden_from_some = 0;
  for (int r = 0; r < rows; ++r) {
    at[r] = {.row = decode_place(*m.job, head.kv_head, row + r), .key = key, .count = count};
    if (masked) decode_bias(m, at[r], bias[r]);
    hidden_from_all &= bias[r].hidden;
    hidden_from_some |= bias[r].hidden;
  }
  if (hidden_from_all == all_keys(count)) return;
  alignas(64) float s[rows][kDecodeBlockKeys];
  float* acc = head.partial.acc + row * head.acc_stride;
  decode_head_scores<dtype, rows>(head, row, keys, count, s);
  for (int r = 0; r < rows; ++r) {
    decode_modify(m, at[r], bias[r].changes ? &bias[r] : nullptr, s[r]);
    decode_softmax<true>(s[r], count, head.partial.max + row + r, head.partial.sum + row + r,
                         acc + r * head.acc_stride, head.acc_stride);
    if (m.job->dropout.threshold != 0) decode_drop(m, at[r], s[r]);
  }
  if (hidden_from_some == 0) {
    decode_accumulate<dtype, rows>(s, values, count, head.value_dim, acc, head.acc_stride);
    return;
  }
  // A hidden key's weight is 0, but its value may be NaN: each row adds up what it sees.
  for (int r = 0; r < rows; ++r) {
    for_each_seen_run(bias[r].hidden, count, [&](std::int64_t first, std::int64_t length) {
      alignas(64) float p[1][kDecodeBlockKeys];
      __builtin_memcpy(p[0], s[r] + first, static_cast<std::size_t>(length) * sizeof(float));
      decode_accumulate<dtype, 1>(p, skip_rows(values, first), length, head.value_dim,
                                  acc + r * head.acc_stride, head.acc_stride);
    });
  }
}

FLASHATTN_INLINE Interval clipped(Interval keys, Interval to) {
  const std::int64_t begin = keys.begin > to.begin ? keys.begin : to.begin;
  const std::int64_t end = keys.end < to.end ? keys.end : to.end;
  return {begin, end > begin ? end : begin};
}

// All rows of a head against keys [block.begin, block.end), whose rows start at keys.base and
// values.base.
template <DType dtype, bool modified>
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
      const auto run = [&](auto block_rows) { block_rows(head, row, seen.begin, k, v, count); };
      if (tile == 4) run(modified ? decode_modified_block<dtype, 4> : decode_block<dtype, 4>);
      if (tile == 2) run(modified ? decode_modified_block<dtype, 2> : decode_block<dtype, 2>);
      if (tile == 1) run(modified ? decode_modified_block<dtype, 1> : decode_block<dtype, 1>);
      // The other rows of the head find what was fetched.
      keys.ahead = 0;
      values.ahead = 0;
    }
    row += tile;
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
