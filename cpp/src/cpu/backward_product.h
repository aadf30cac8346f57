// The three products of the backward pass that add to sums in memory: dV += P^T dO, dK += dS^T Q
// and dQ += dS K. Relies on the tile kernel; the weights and score gradients are backward_tile.h's.
#pragma once

#include "cpu/backward_tile.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward {

// Tiles of a product at most: kBlockQ rows of dQ.
constexpr std::int64_t kMaxTiles = kBlockQ / kTileRows;

// C[kTileRows t + m][0..lanes) += sum over the elements e of ranges[t] of A(t, m, e)
// B[e][0..lanes), for the tiles t of [0, tiles). Both ends of a range are rounded outwards to whole
// units, where A must be 0. Strides in units.
struct Product {
  const float* A = nullptr;
  std::ptrdiff_t a_tile = 0;
  std::ptrdiff_t a_row = 0;
  std::ptrdiff_t a_depth = 0;
  const float* B = nullptr;
  std::ptrdiff_t b_row = 0;
  float* C = nullptr;      // rows `lanes` apart
  std::int64_t lanes = 0;  // columns, whole vectors
  const Interval* ranges = nullptr;
  std::int64_t tiles = 0;
};

// The vecs vectors of columns from d on. The tiles come innermost: what they share of B, kBlockQ or
// kBlockK rows of vecs vectors, stays in the first-level cache.
template <class Unit, int vecs>
FLASHATTN_INLINE void add_columns(const Product& product, std::int64_t d) {
  for (std::int64_t t = 0; t < product.tiles; ++t) {
    const Interval range = product.ranges[t];
    if (range.begin >= range.end) continue;
    const std::int64_t first = range.begin / Unit::kElements;
    const std::int64_t depth = units_of<Unit>(range.end) - first;
    float* C = product.C + t * kTileRows * product.lanes + d;
    Vec acc[kTileRows][vecs];
    load_tile(C, product.lanes, acc);
    multiply<Unit>(depth, product.A + t * product.a_tile + first * product.a_depth, product.a_row,
                   product.a_depth, product.B + first * product.b_row + d, product.b_row, acc);
    store_tile(C, product.lanes, acc);
  }
}

template <class Unit>
FLASHATTN_NOINLINE void add_product(const Product& product) {
  std::int64_t d = 0;
  for (std::int64_t left = product.lanes / kLanes; left > 0; left = product.lanes / kLanes - d) {
    // Five vectors are 3 + 2: a tile of one is bound by the latency of its additions.
    const std::int64_t vecs = kTileVecs == 4 && left == 5 ? 3 : left;
    const auto columns = [&](auto count) __attribute__((always_inline)) {
      add_columns<Unit, decltype(count)::value>(product, d * kLanes);
      d += decltype(count)::value;
    };
    with_vecs<1, 1>(vecs, columns);
  }
}

// One row alone: C[0..lanes) += sum over the elements e whose bit is set of A[e] B[e][0..lanes),
// and no other element of B is touched by an operation: a unit of which one element is not in the
// set enters with that element cleared in B. The sums are those of add_product, bit for bit.
template <class Unit>
FLASHATTN_NOINLINE void add_row_product(std::uint64_t elements, const float* A,
                                        std::ptrdiff_t a_depth, const float* B,
                                        std::ptrdiff_t b_row, float* C, std::int64_t lanes) {
  constexpr std::uint64_t kUnitBits = (std::uint64_t{1} << Unit::kElements) - 1;
  for (std::int64_t d = 0; d < lanes; d += kLanes) {
    Vec acc = load(C + d);
    std::int64_t u = 0;
    for (std::uint64_t left = elements; left != 0; left >>= Unit::kElements, ++u) {
      const std::uint64_t seen = left & kUnitBits;
      if (seen == 0) continue;
      VecI b = bits_of(load(B + u * b_row + d));
      if constexpr (Unit::kElements == 2) {
        if (seen == 2) b &= broadcast(static_cast<std::int32_t>(0xffff0000U));
        if (seen == 1) b &= broadcast(std::int32_t{0x0000ffff});
      }
      acc = Unit::multiply_add(acc, broadcast(A[u * a_depth]), vec_of_bits(b));
    }
    store(C + d, acc);
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward
