// Score modifiers in decode, where a vector holds consecutive keys of one row: softcap, ALiBi and
// mask on a row of up to kDecodeBlockKeys scores, and the dropout of its weights. Scores are in
// natural units. Keys that the mask hides are never read into a sum. Relies on modifiers.h and on
// mask_lanes.h for the reading of masks, philox_lanes.h for the generator.
#pragma once

#include "cpu/decode_table.h"
#include "cpu/modifiers.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// What the rows of a chunk share.
struct DecodeModifiers {
  const AttentionJob* job = nullptr;
  std::int64_t batch = 0;
  float scale_over_cap = 0.0F;
  PhiloxLanes philox{};
};

FLASHATTN_INLINE DecodeModifiers decode_modifiers(const AttentionJob& job, std::int64_t batch) {
  DecodeModifiers m{.job = &job, .batch = batch};
  if (job.softcap != 0.0F) m.scale_over_cap = scale_over_cap(job);
  if (job.dropout.threshold != 0) m.philox = philox_lanes(job.dropout);
  return m;
}

// One query row against keys [key, key + count), count <= kDecodeBlockKeys.
struct DecodeRowKeys {
  LanePlace row;
  std::int64_t key = 0;
  std::int64_t count = 0;
};

// A row's bias, and which of its keys the mask hides: bit k is key + k.
struct DecodeBias {
  alignas(64) float of_key[kDecodeBlockKeys];
  std::uint64_t hidden = 0;
  bool changes = false;  // some element is not 0
};

static_assert(kDecodeBlockKeys == 64, "a bit for each key");

FLASHATTN_INLINE std::uint64_t all_keys(std::int64_t count) {
  return count == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1U;
}

FLASHATTN_NOINLINE void decode_bias(const DecodeModifiers& m, const DecodeRowKeys& keys,
                                    DecodeBias& bias) {
  const AttentionJob& job = *m.job;
  const char* const row = mask_row(job, m.batch, keys.row.head, keys.row.row);
  const std::ptrdiff_t key_bytes =
      job.mask.key_stride * static_cast<std::int64_t>(item_size(job.mask.dtype));
  bias.hidden = 0;
  VecI changes{};
  with_mask_dtype(job.mask.dtype, [&](auto type) __attribute__((always_inline)) {
    for (std::int64_t k = 0; k < keys.count; k += kLanes) {
      const Vec x =
          mask_keys<decltype(type)::kDType>(row, key_bytes, keys.key + k, keys.key + keys.count);
      store(bias.of_key + k, x);
      changes |= x != Vec{};
    }
  });
  bias.changes = any(changes);
  if (!bias.changes) return;
  for (std::int64_t k = 0; k < keys.count; ++k) {
    if (bias.of_key[k] == -kInfinity) bias.hidden |= std::uint64_t{1} << k;
  }
}

// s[0..count), scale * (q . k) or under a softcap q . k alone, become scores; the vector that holds
// the last is filled up with -inf. bias: null where the mask has nothing to add.
FLASHATTN_NOINLINE void decode_modify(const DecodeModifiers& m, const DecodeRowKeys& keys,
                                      const DecodeBias* bias, float* s) {
  const AttentionJob& job = *m.job;
  const bool alibi = job.slopes.data != nullptr;
  const Vec slope = broadcast(alibi ? job.slopes.at(m.batch, keys.row.head) : 0.0F);
  const std::int64_t position = keys.row.row + job.visibility[m.batch].shift;
  const Vec distance = broadcast(static_cast<float>(position - keys.key)) -
                       __builtin_convertvector(lane_numbers(), Vec);
  for (std::int64_t k = 0; k < keys.count; k += kLanes) {
    Vec x = load(s + k);
    if (job.softcap != 0.0F)
      x = tanh(x * broadcast(m.scale_over_cap)).value * broadcast(job.softcap);
    if (alibi) x -= slope * magnitude(distance - broadcast(static_cast<float>(k)));
    if (bias != nullptr) {
      const Vec b = load(bias->of_key + k);
      x = select(b == broadcast(-kInfinity), b, x + b);
    }
    store(s + k, x);
  }
  for (std::int64_t k = keys.count; k % kLanes != 0; ++k) s[k] = -kInfinity;
}

// The weights that do not stay become 0.
FLASHATTN_NOINLINE void decode_drop(const DecodeModifiers& m, const DecodeRowKeys& keys, float* p) {
  const std::uint64_t n = m.job->dropout.numbering.index(
      static_cast<std::uint64_t>(m.batch), static_cast<std::uint64_t>(keys.row.head),
      static_cast<std::uint64_t>(keys.row.row), static_cast<std::uint64_t>(keys.key));
  // Words of whole blocks from that of n on, kLanes / 2 blocks at a time, and room to read a
  // vector.
  constexpr int kBlocks = kLanes / 2;
  constexpr std::int64_t kWords = kDecodeBlockKeys + 4 * kBlocks + 4;
  alignas(64) std::uint32_t words[kWords + kLanes];
  const auto first = static_cast<std::int64_t>(n % 4);
  VecWide m_of_lane = VecWide{} + n / 4;
  for (int i = 0; i < kBlocks; ++i) m_of_lane[i] += static_cast<std::uint64_t>(i);
  for (std::int64_t at = 0; at < first + keys.count; at += 4 * kBlocks) {
    VecWide word[4];
    philox_wide(m.philox, m_of_lane, word);
    for (int i = 0; i < kBlocks; ++i) {
      for (int w = 0; w < 4; ++w) words[at + 4 * i + w] = static_cast<std::uint32_t>(word[w][i]);
    }
    m_of_lane += std::uint64_t{kBlocks};
  }
  const VecU limit = VecU{} + m.philox.limit;
  for (std::int64_t k = 0; k < keys.count; k += kLanes) {
    const VecU word = reinterpret_cast<VecU>(load(words + first + k));
    store(p + k, select(reinterpret_cast<VecI>(word > limit), load(p + k), Vec{}));
  }
}

// Calls body(first, count) for every run of keys that are not hidden.
template <class Body>
FLASHATTN_INLINE void for_each_seen_run(std::uint64_t hidden, std::int64_t count,
                                        const Body& body) {
  for (std::int64_t k = 0; k < count;) {
    if ((hidden >> k & 1U) != 0) {
      ++k;
      continue;
    }
    std::int64_t end = k + 1;
    while (end < count && (hidden >> end & 1U) == 0) ++end;
    body(k, end - k);
    k = end;
  }
}

// What the mask says of a block of keys to all rows of kv heads [heads.begin, heads.end).
FLASHATTN_INLINE TileVisibility decode_mask_class(const DecodeModifiers& m, Interval heads,
                                                  Interval block) {
  const AttentionJob& job = *m.job;
  if (job.mask.data == nullptr) return TileVisibility::kAll;
  const std::int64_t first_head = heads.begin * job.heads_per_kv;
  const std::int64_t last_head =
      job.mask.head_stride == 0 ? first_head + 1 : heads.end * job.heads_per_kv;
  const std::int64_t last_row = job.mask.row_stride == 0 ? 1 : job.seqlen_q;
  bool all = true;
  bool none = true;
  for (std::int64_t h = first_head; h < last_head && (all || none); ++h) {
    for (std::int64_t i = 0; i < last_row; ++i) {
      const std::int64_t count = block.end - block.begin;
      DecodeBias bias;
      decode_bias(m, {.row = {h, i}, .key = block.begin, .count = count}, bias);
      all = all && !bias.changes;
      none = none && bias.hidden == all_keys(count);
    }
  }
  if (none) return TileVisibility::kNone;
  return all ? TileVisibility::kAll : TileVisibility::kMixed;
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
