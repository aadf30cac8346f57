// One tile of kTileRows keys against the query lanes of a block: its weights P and score gradients
// dS. Relies on the tile kernel and exp2; the sums over queries and keys are backward_block.h's.
#pragma once

#include "cpu/backward_layout.h"
#include "cpu/math.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward {

// Vectors of a register tile: all accumulators, a row of B and a broadcast must fit the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileVecs = 4;
#else
constexpr int kTileVecs = 2;
#endif

// x, rounded: the compiler may not fuse the operation that made it into the next one.
FLASHATTN_INLINE Vec rounded(Vec x) {
#if defined(__aarch64__)
  __asm__("" : "+w"(x));
#elif defined(__AVX512F__)
  __asm__("" : "+v"(x));
#else
  __asm__("" : "+x"(x));
#endif
  return x;
}

// exp(s * scale - lse). s * scale is rounded as the forward rounded it into lse, so that in a row
// with one overwhelming weight the difference is exactly 0 however large the scores are. lse that
// is not of these scores may make the weight overflow to infinity, never wrap.
template <class Unit>
FLASHATTN_INLINE Vec weight(Vec s, Vec scale, Vec lse) {
  Vec x = (rounded(s * scale) - lse) * kLog2E;
#if !defined(__AVX512F__)
  x = select(x > broadcast(128.0F), broadcast(128.0F), x);
#endif
  return exp2<Unit::kExpDegree>(x);
}

// Where the four keys of a tile and the lanes of its first vector are in the block's buffers.
struct TilePlace {
  std::int64_t key = 0;   // from the key block's first, a multiple of kTileRows
  std::int64_t lane = 0;  // from the query block's first, a multiple of kLanes
};

// What the row lane sees of the key: key_begin <= key < key_end, per lane of vector n.
template <class Unit>
FLASHATTN_INLINE VecI visible(const QueryBlock<Unit>& block, TilePlace at, int row, int n) {
  const VecI key = broadcast(static_cast<std::int32_t>(at.key) + row);
  const std::int64_t lane = at.lane + n * kLanes;
  return (key >= bits_of(load(block.key_begin + lane))) &
         (key < bits_of(load(block.key_end + lane)));
}

// P and dS of a tile into the forms that the three remaining products read.
template <class Unit, int vecs>
FLASHATTN_INLINE void store_weights(const QueryBlock<Unit>& block, TilePlace at,
                                    const Vec (&p)[kTileRows][vecs]) {
  store_tile(block.p + at.lane, kBlockQ, p);
#if defined(FLASHATTN_HAS_BF16_DOT)
  if constexpr (Unit::kElements == 2) {
    FLASHATTN_UNROLL for (int m = 0; m < kTileRows; ++m) {
      FLASHATTN_UNROLL for (int n = 0; n < vecs; n += 2) {
        store(block.p_units + (m * kBlockQ + at.lane + n * kLanes) / 2,
              concat_bf16(p[m][n], p[m][n + 1]));
      }
    }
  }
#endif
}

template <class Unit, int vecs>
FLASHATTN_INLINE void store_score_gradients(const QueryBlock<Unit>& block, TilePlace at,
                                            const Vec (&ds)[kTileRows][vecs]) {
  if constexpr (Unit::kElements == 1) {
    store_tile(block.ds + at.key * kBlockQ + at.lane, kBlockQ, ds);
  }
#if defined(FLASHATTN_HAS_BF16_DOT)
  if constexpr (Unit::kElements == 2) {
    FLASHATTN_UNROLL for (int m = 0; m < kTileRows; ++m) {
      FLASHATTN_UNROLL for (int n = 0; n < vecs; n += 2) {
        store(block.ds_units + (m * kBlockQ + at.lane + n * kLanes) / 2,
              concat_bf16(ds[m][n], ds[m][n + 1]));
      }
    }
    FLASHATTN_UNROLL for (int m = 0; m < kTileRows; m += 2) {
      FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
        store(block.ds + (at.key + m) / 2 * kBlockQ + at.lane + n * kLanes,
              interleave_bf16(ds[m][n], ds[m + 1][n]));
      }
    }
  }
#endif
}

// S^T = K Q^T, P = exp(S - lse), dP^T = V dO^T, dS = P (dP - delta), for vecs vectors of lanes.
// masked: both are 0, whatever they were, where the row may not see the key.
template <class Unit, bool masked, int vecs>
FLASHATTN_INLINE void score_tile(const BackwardShape<Unit>& shape, const float* keys,
                                 const float* values, float scale, const QueryBlock<Unit>& block,
                                 TilePlace at) {
  Vec acc[kTileRows][vecs];
  zero_tile(acc);
  multiply<Unit>(shape.head_units, keys, shape.head_packed, 1, block.q_columns + at.lane, kBlockQ,
                 acc);
  FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
    const Vec lse = load(block.lse + at.lane + n * kLanes);
    FLASHATTN_UNROLL for (int m = 0; m < kTileRows; ++m) {
      const Vec p = weight<Unit>(acc[m][n], broadcast(scale), lse);
      acc[m][n] = masked ? select(visible(block, at, m, n), p, Vec{}) : p;
    }
  }
  store_weights<Unit>(block, at, acc);
  zero_tile(acc);
  multiply<Unit>(shape.value_units, values, shape.value_packed, 1, block.dout_columns + at.lane,
                 kBlockQ, acc);
  FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
    const Vec delta = load(block.delta + at.lane + n * kLanes);
    FLASHATTN_UNROLL for (int m = 0; m < kTileRows; ++m) {
      const Vec p = load(block.p + m * kBlockQ + at.lane + n * kLanes);
      const Vec ds = p * (acc[m][n] - delta);
      acc[m][n] = masked ? select(visible(block, at, m, n), ds, Vec{}) : ds;
    }
  }
  store_score_gradients<Unit>(block, at, acc);
}

// The same for the lanes of vectors [first, last), multiples of Unit::kElements.
template <class Unit, bool masked>
FLASHATTN_INLINE void score_tiles(const BackwardShape<Unit>& shape, const float* keys,
                                  const float* values, float scale, const QueryBlock<Unit>& block,
                                  std::int64_t key, std::int64_t first, std::int64_t last) {
  for (std::int64_t vec = first; vec < last; vec += kTileVecs) {
    const TilePlace at{.key = key, .lane = vec * kLanes};
    const std::int64_t left = last - vec;
    if (!masked || left >= kTileVecs) {
      score_tile<Unit, masked, kTileVecs>(shape, keys, values, scale, block, at);
    } else if constexpr (Unit::kElements == 2) {
      score_tile<Unit, masked, 2>(shape, keys, values, scale, block, at);
    } else if (kTileVecs > 3 && left == 3) {
      score_tile<Unit, masked, 3>(shape, keys, values, scale, block, at);
    } else if (kTileVecs > 2 && left == 2) {
      score_tile<Unit, masked, 2>(shape, keys, values, scale, block, at);
    } else {
      score_tile<Unit, masked, 1>(shape, keys, values, scale, block, at);
    }
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward
