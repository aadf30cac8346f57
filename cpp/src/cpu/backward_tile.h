// One tile of kTileRows keys against the query lanes of a block: its weights P and score gradients
// dS. Relies on the tile kernel and exp2; the sums over queries and keys are backward_product.h's.
#pragma once

#include "cpu/backward_layout.h"
#include "cpu/math.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward {

// A number of vectors as a type.
template <int count>
struct Vecs {
  static constexpr int value = count;
};

// body(Vecs<n>{}) for n = min(left, kTileVecs), known to be at least `least` and a multiple of
// `step`.
template <int least, int step, int n = kTileVecs, class Body>
FLASHATTN_INLINE void with_vecs(std::int64_t left, const Body& body) {
  if constexpr (n - step < least) {
    body(Vecs<n>{});
  } else if (left >= n) {
    body(Vecs<n>{});
  } else {
    with_vecs<least, step, n - step>(left, body);
  }
}

// exp(scale s - lse) = 2^(scale_log2 s - lse_log2), the second split in two so that the difference
// is that of the forward's own exponents and of lse as it was rounded. lse that is not of these
// scores may make the weight overflow to infinity, never wrap.
template <class Unit>
FLASHATTN_INLINE Vec weight(Vec s, Vec scale_log2, Vec lse_high, Vec lse_low) {
  Vec x = (s * scale_log2 - lse_high) - lse_low;
#if !defined(__AVX512F__)
  x = select(x > broadcast(128.0F), broadcast(128.0F), x);
#endif
  return exp2<Unit::kExpDegree>(x);
}

// Where a tile lies: its keys, counted from the strip's and from the block's first (multiples of
// kTileRows), and its first lane (a multiple of kLanes).
struct TilePlace {
  std::int64_t strip_key = 0;
  std::int64_t key = 0;
  std::int64_t lane = 0;
};

// Whether the lanes of vector n see key `row` of the tile: key_begin <= key < key_end.
template <class Unit>
FLASHATTN_INLINE VecI visible(const QueryBlock<Unit>& block, TilePlace at, int row, int n) {
  const VecI key = broadcast(static_cast<std::int32_t>(at.key) + row);
  const std::int64_t lane = at.lane + n * kLanes;
  return (key >= bits_of(load(block.key_begin + lane))) &
         (key < bits_of(load(block.key_end + lane)));
}

// x as bf16 into to[strip_key + m][lane ..] of a strip's [kStripKeys][kBlockQ] bf16 matrix.
template <class Unit, int vecs>
FLASHATTN_INLINE void store_by_query(float* to, TilePlace at, const Vec (&x)[kTileRows][vecs]) {
#if defined(FLASHATTN_HAS_BF16_DOT)
  FLASHATTN_UNROLL for (int m = 0; m < kTileRows; ++m) {
    FLASHATTN_UNROLL for (int n = 0; n < vecs; n += 2) {
      store(to + ((at.strip_key + m) * kBlockQ + at.lane + n * kLanes) / 2,
            concat_bf16(x[m][n], x[m][n + 1]));
    }
  }
#endif
}

// S^T = K Q^T and P = exp(scale S - lse) for vecs vectors of lanes. masked: P is 0, whatever it
// was, where the row may not see the key.
template <class Unit, bool masked, int vecs>
FLASHATTN_INLINE void weight_tile(const BackwardShape<Unit>& shape, const float* keys,
                                  float scale_log2, const QueryBlock<Unit>& block, TilePlace at) {
  Vec acc[kTileRows][vecs];
  dot_tile<Unit>(shape.head_units, keys + at.key * shape.head_packed, shape.head_packed,
                 block.q_columns + at.lane, kBlockQ, acc);
  FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
    const Vec lse_high = load(block.lse_high + at.lane + n * kLanes);
    const Vec lse_low = load(block.lse_low + at.lane + n * kLanes);
    FLASHATTN_UNROLL for (int m = 0; m < kTileRows; ++m) {
      const Vec p = weight<Unit>(acc[m][n], broadcast(scale_log2), lse_high, lse_low);
      acc[m][n] = masked ? select(visible(block, at, m, n), p, Vec{}) : p;
    }
  }
  store_tile(block.p + at.strip_key * kBlockQ + at.lane, kBlockQ, acc);
  if constexpr (Unit::kElements == 2) store_by_query<Unit>(block.p_units, at, acc);
}

// dS into every form in which it is read.
template <class Unit, int vecs>
FLASHATTN_INLINE void store_score_gradients(const QueryBlock<Unit>& block, TilePlace at,
                                            const Vec (&ds)[kTileRows][vecs]) {
  if constexpr (Unit::kElements == 1) {
    store_tile(block.ds + at.key * kBlockQ + at.lane, kBlockQ, ds);
  } else {
    store_by_query<Unit>(block.ds_units, at, ds);
#if defined(FLASHATTN_HAS_BF16_DOT)
    FLASHATTN_UNROLL for (int m = 0; m < kTileRows; m += 2) {
      FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
        store(block.ds + (at.key + m) / 2 * kBlockQ + at.lane + n * kLanes,
              interleave_bf16(ds[m][n], ds[m + 1][n]));
      }
    }
#endif
  }
}

// dP^T = V dO^T and dS = P (dP - delta), likewise.
template <class Unit, bool masked, int vecs>
FLASHATTN_INLINE void score_gradient_tile(const BackwardShape<Unit>& shape, const float* values,
                                          const QueryBlock<Unit>& block, TilePlace at) {
  Vec acc[kTileRows][vecs];
  dot_tile<Unit>(shape.value_units, values + at.key * shape.value_packed, shape.value_packed,
                 block.dout_columns + at.lane, kBlockQ, acc);
  FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
    const Vec delta = load(block.delta + at.lane + n * kLanes);
    FLASHATTN_UNROLL for (int m = 0; m < kTileRows; ++m) {
      const Vec p = load(block.p + (at.strip_key + m) * kBlockQ + at.lane + n * kLanes);
      const Vec ds = p * (acc[m][n] - delta);
      acc[m][n] = masked ? select(visible(block, at, m, n), ds, Vec{}) : ds;
    }
  }
  store_score_gradients<Unit>(block, at, acc);
}

// body(Vecs<n>{}, place) for the register tiles that make up vectors [first, last) of the tile at
// `at`; both are multiples of Unit::kElements, and no tile has fewer than `least` vectors.
template <class Unit, int least, class Body>
FLASHATTN_INLINE void for_lane_tiles(TilePlace at, std::int64_t first, std::int64_t last,
                                     const Body& body) {
  for (std::int64_t vec = first; vec < last; vec += kTileVecs) {
    at.lane = vec * kLanes;
    const auto tile = [&](auto vecs) __attribute__((always_inline)) { body(vecs, at); };
    with_vecs<least, Unit::kElements>(last - vec, tile);
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward
