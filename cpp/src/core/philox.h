// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011) and the numbering that turns it into a dropout mask. The numbering is part of the result:
// the same on every backend, tile shape, shard and thread count.
#pragma once

#include <cstdint>

#include "core/inline.h"

namespace flashattn {

inline constexpr std::uint32_t kPhiloxMultiplier0 = 0xd2511f53U;
inline constexpr std::uint32_t kPhiloxMultiplier1 = 0xcd9e8d57U;
// Added to the two halves of the key from round to round.
inline constexpr std::uint32_t kPhiloxWeyl0 = 0x9e3779b9U;
inline constexpr std::uint32_t kPhiloxWeyl1 = 0xbb67ae85U;
inline constexpr int kPhiloxRounds = 10;

struct PhiloxBlock {
  std::uint32_t word[4];
};

// The four random words of a 128-bit counter (counter[0] lowest) under a 64-bit key.
FLASHATTN_INLINE PhiloxBlock philox4x32(PhiloxBlock counter, std::uint32_t key_low,
                                        std::uint32_t key_high) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const std::uint64_t product0 = std::uint64_t{kPhiloxMultiplier0} * counter.word[0];
    const std::uint64_t product1 = std::uint64_t{kPhiloxMultiplier1} * counter.word[2];
    const auto high0 = static_cast<std::uint32_t>(product0 >> 32);
    const auto high1 = static_cast<std::uint32_t>(product1 >> 32);
    counter = {{high1 ^ counter.word[1] ^ key_low, static_cast<std::uint32_t>(product1),
                high0 ^ counter.word[3] ^ key_high, static_cast<std::uint32_t>(product0)}};
    key_low += kPhiloxWeyl0;
    key_high += kPhiloxWeyl1;
  }
  return counter;
}

// The words of elements 4m .. 4m+3 of the stream (seed, offset): counter offset + m, which wraps in
// 64 bits, in the low half of the 128.
FLASHATTN_INLINE PhiloxBlock dropout_block(std::uint64_t seed, std::uint64_t offset,
                                           std::uint64_t m) {
  const std::uint64_t low = offset + m;
  return philox4x32(
      {{static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32), 0U, 0U}},
      static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32));
}

// Where the scores of one call lie in the global (batch, heads, queries, keys) numbering.
struct DropoutNumbering {
  std::uint64_t global_heads = 0;
  std::uint64_t head_start = 0;
  std::uint64_t global_queries = 0;
  std::uint64_t query_start = 0;
  std::uint64_t global_keys = 0;
  std::uint64_t key_start = 0;

  // n of score (b, h, i, j); arithmetic modulo 2^64.
  FLASHATTN_INLINE std::uint64_t index(std::uint64_t b, std::uint64_t h, std::uint64_t i,
                                       std::uint64_t j) const {
    const std::uint64_t head = b * global_heads + head_start + h;
    const std::uint64_t row = head * global_queries + query_start + i;
    return row * global_keys + key_start + j;
  }
};

// Dropout as integers: the weight of element n stays iff (word >> 8) >= threshold.
struct DropoutRule {
  std::uint32_t threshold = 0;  // ceil(probability * 2^24), at most 2^24; 0 is no dropout
  float keep_scale = 1.0F;      // 1 / (1 - probability), 0 for probability 1
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  DropoutNumbering numbering{};
};

// The uniform number in [0, 1) of element n: a multiple of 2^-24, exact in float32.
FLASHATTN_INLINE float dropout_unit(std::uint64_t seed, std::uint64_t offset, std::uint64_t n) {
  const PhiloxBlock block = dropout_block(seed, offset, n / 4);
  return static_cast<float>(block.word[n % 4] >> 8) * 0x1p-24F;
}

// Whether the weight of element n stays; those that do are scaled by 1 / (1 - probability).
FLASHATTN_INLINE bool dropout_keeps(std::uint64_t seed, std::uint64_t offset, std::uint64_t n,
                                    double probability) {
  return static_cast<double>(dropout_unit(seed, offset, n)) >= probability;
}

}  // namespace flashattn
