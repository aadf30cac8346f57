// Dropout for scores whose queries stand in the lanes: which weights of a tile of kTileRows keys
// stay. The numbering and the generator are core/philox.h's, to the bit. One Philox block holds the
// words of four consecutive keys of a lane, so where a lane's element numbers are multiples of four
// at its tiles a tile takes one block; elsewhere it takes words of two, and a run over the keys
// keeps the second for its next tile.
#pragma once

#include "core/philox.h"
#include "cpu/job.h"
#include "cpu/tile.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

static_assert(kTileRows == 4, "a Philox block has four words");

// The generator of one call, ready for vectors.
struct PhiloxLanes {
  std::uint64_t key[2 * kPhiloxRounds] = {};  // the round keys, one in each 64-bit lane
  std::uint64_t offset = 0;
  std::uint32_t limit = 0;  // a weight stays iff its word is above this
};

FLASHATTN_INLINE PhiloxLanes philox_lanes(const DropoutRule& rule) {
  PhiloxLanes lanes;
  auto low = static_cast<std::uint32_t>(rule.seed);
  auto high = static_cast<std::uint32_t>(rule.seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    lanes.key[2 * round] = low;
    lanes.key[2 * round + 1] = high;
    low += kPhiloxWeyl0;
    high += kPhiloxWeyl1;
  }
  lanes.offset = rule.offset;
  // word >> 8 >= threshold, and never for threshold 2^24.
  lanes.limit = (rule.threshold << 8) - 1U;
  return lanes;
}

FLASHATTN_INLINE VecWide load_wide(const std::uint64_t* from) {
  return reinterpret_cast<VecWide>(load(from));
}

// The four words of blocks offset + m, each in the low half of a 64-bit lane; the high halves hold
// garbage throughout, which no product reads.
FLASHATTN_INLINE void philox_wide(const PhiloxLanes& philox, VecWide m, VecWide (&word)[4]) {
  const VecWide multiplier0 = VecWide{} + kPhiloxMultiplier0;
  const VecWide multiplier1 = VecWide{} + kPhiloxMultiplier1;
  const VecWide low = m + philox.offset;
  // The first round, of a counter whose upper two words are 0.
  const VecWide first = multiply_low(low, multiplier0);
  word[0] = (low >> 32) ^ philox.key[0];
  word[1] = VecWide{};
  word[2] = (first >> 32) ^ philox.key[1];
  word[3] = first;
  FLASHATTN_UNROLL for (int round = 1; round < kPhiloxRounds; ++round) {
    const VecWide product0 = multiply_low(word[0], multiplier0);
    const VecWide product1 = multiply_low(word[2], multiplier1);
    word[0] = (product1 >> 32) ^ word[1] ^ philox.key[2 * round];
    word[1] = product1;
    word[2] = (product0 >> 32) ^ word[3] ^ philox.key[2 * round + 1];
    word[3] = product0;
  }
}

// The element numbers of key 0 of each lane, in the order that 64-bit lanes want: of each vector
// the even lanes first, then the odd ones.
template <int lanes>
struct DropoutLanes {
  PhiloxLanes philox;
  alignas(64) std::uint64_t number[lanes];
  bool aligned = true;  // all of them multiples of four

  FLASHATTN_INLINE void set(int lane, std::uint64_t n) {
    const int in_vector = lane % kLanes;
    number[lane - in_vector + in_vector % 2 * (kLanes / 2) + in_vector / 2] = n;
    if (n % 4 != 0) aligned = false;
  }
};

// Walks over the keys of one vector of lanes, from a multiple of four on, four at a time.
template <int lanes>
class DropoutRun {
 public:
  static constexpr bool kDrops = true;

  FLASHATTN_INLINE DropoutRun(const DropoutLanes<lanes>& dropout, int lane, std::int64_t key)
      : philox_(dropout.philox), aligned_(dropout.aligned) {
    const VecWide even = load_wide(dropout.number + lane) + static_cast<std::uint64_t>(key);
    const VecWide odd =
        load_wide(dropout.number + lane + kLanes / 2) + static_cast<std::uint64_t>(key);
    even_ = even >> 2;
    odd_ = odd >> 2;
    if (aligned_) return;
    place_ = join(even & 3U, odd & 3U);
    draw(last_);
  }

  // keep[i]: the lanes whose weight of key `i` of this tile stays. Moves on to the next tile.
  FLASHATTN_INLINE void next(VecI (&keep)[kTileRows]) {
    VecU word[4];
    draw(word);
    if (!aligned_) take_from_two(word);
    const VecU limit = VecU{} + philox_.limit;
    FLASHATTN_UNROLL for (int i = 0; i < kTileRows; ++i) {
      keep[i] = reinterpret_cast<VecI>(word[i] > limit);
    }
  }

 private:
  // Low halves of both as one vector, even_lanes in the even lanes.
  static FLASHATTN_INLINE VecU join(VecWide even_lanes, VecWide odd_lanes) {
    return reinterpret_cast<VecU>((even_lanes & 0xffffffffU) | (odd_lanes << 32));
  }

  FLASHATTN_INLINE void draw(VecU (&word)[4]) {
    VecWide even[4];
    VecWide odd[4];
    philox_wide(philox_, even_, even);
    philox_wide(philox_, odd_, odd);
    FLASHATTN_UNROLL for (int i = 0; i < 4; ++i) word[i] = join(even[i], odd[i]);
    even_ += 1U;
    odd_ += 1U;
  }

  // word: the block after last_. Key i's word is number place_ + i of the two blocks.
  FLASHATTN_INLINE void take_from_two(VecU (&word)[4]) {
    const VecU by_one = (place_ & 1U) != 0U ? VecU{} - 1U : VecU{};
    const VecU by_two = (place_ & 2U) != 0U ? VecU{} - 1U : VecU{};
    VecU both[8];
    FLASHATTN_UNROLL for (int i = 0; i < 4; ++i) {
      both[i] = last_[i];
      both[i + 4] = word[i];
      last_[i] = word[i];
    }
    VecU shifted[6];
    FLASHATTN_UNROLL for (int i = 0; i < 6; ++i) {
      shifted[i] = by_one != 0U ? both[i + 1] : both[i];
    }
    FLASHATTN_UNROLL for (int i = 0; i < 4; ++i) {
      word[i] = by_two != 0U ? shifted[i + 2] : shifted[i];
    }
  }

  const PhiloxLanes& philox_;
  bool aligned_;
  VecWide even_;  // the block that comes next
  VecWide odd_;
  VecU place_{};    // of the tile's first key in its block
  VecU last_[4]{};  // words of the block drawn last, where a tile takes from two
};

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
