// S^T = K Q^T for one key block, tile by tile, with the running maximum of every lane. Tiles that
// no lane sees are skipped, tiles that some lane does not see whole are masked. The modified kernel
// also does to each tile what modifiers.h says.
#pragma once

#include "cpu/forward_visible.h"
#include "cpu/math.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// Selects, so that a score of an excluded key is -inf even when it was NaN.
template <int vecs>
FLASHATTN_INLINE void mask_tile(const VisibleLanes& lanes, int lane, std::int64_t key,
                                Vec (&s)[kTileRows][vecs]) {
  FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
    const VecI begin = load_int32(lanes.begin + lane + n * kLanes);
    const VecI end = load_int32(lanes.end + lane + n * kLanes);
    FLASHATTN_UNROLL for (int i = 0; i < kTileRows; ++i) {
      const VecI at = broadcast(static_cast<std::int32_t>(key + i));
      s[i][n] = select((at >= begin) & (at < end), s[i][n], broadcast(-kInfinity));
    }
  }
}

// What is done to the scores of the plain kernel: nothing.
struct PlainScores {
  FLASHATTN_INLINE void start_keys(std::int64_t, int) {}
  template <int vecs>
  FLASHATTN_INLINE void modify(int, int, Vec (&)[kTileRows][vecs]) const {}
};

// kTileRows keys x vecs vectors of lanes, from `lane` on.
template <class Unit, int vecs, class Modified>
FLASHATTN_INLINE void score_tile(const PackedHead<Unit>& head, std::int64_t depth,
                                 const BlockScratch<Unit>& scratch, const VisibleLanes& lanes,
                                 const KeyBlock& block, const Modified& modified, int k, int lane) {
  const std::int64_t key = block.first_key + k;
  Vec s[kTileRows][vecs];
  dot_tile<Unit>(depth, head.K + key * head.k_ld, head.k_ld, scratch.Q + lane, kBlockQ, s);
  modified.modify(k, lane, s);
  const int vec = lane / kLanes;
  if (key < lanes.every_begin[vec + vecs - 1] || key + kTileRows > lanes.every_end[vec]) {
    mask_tile(lanes, lane, key, s);
  }
  float* const S = scratch.S + k * kBlockQ + lane;
  float* const block_max = scratch.block_max + lane;
  FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
    // A NaN score is left out of the maximum here; it reaches the row through its exponential.
    Vec m = load(block_max + n * kLanes);
    FLASHATTN_UNROLL for (int i = 0; i < kTileRows; ++i) m = max(s[i][n], m);
    store(block_max + n * kLanes, m);
  }
  store_tile(S, kBlockQ, s);
}

template <class Unit, class Modified>
FLASHATTN_INLINE void score_block(const PackedHead<Unit>& head, std::int64_t depth,
                                  const BlockScratch<Unit>& scratch, const VisibleLanes& lanes,
                                  const KeyBlock& block, Modified modified) {
  for (int k = 0; k < block.length; k += kTileRows) {
    modified.start_keys(block.first_key, k);
    for (int panel = 0; panel < kBlockVecs; panel += kPanelVecs) {
      const VecRange range = vecs_at(block, panel, k);
      const int lane = range.first * kLanes;
      switch (range.last - range.first) {
        case 0:
          break;
        case 1:
          score_tile<Unit, 1>(head, depth, scratch, lanes, block, modified, k, lane);
          break;
        case 2:
          score_tile<Unit, 2>(head, depth, scratch, lanes, block, modified, k, lane);
          break;
        case 3:
          if constexpr (kPanelVecs >= 3)
            score_tile<Unit, 3>(head, depth, scratch, lanes, block, modified, k, lane);
          break;
        default:
          if constexpr (kPanelVecs >= 4)
            score_tile<Unit, 4>(head, depth, scratch, lanes, block, modified, k, lane);
          break;
      }
    }
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
