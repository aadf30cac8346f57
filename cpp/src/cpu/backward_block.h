// A block of query rows against a block of keys: the five matrix products of the backward pass.
//
//   for each tile of kTileRows keys:
//     S^T = K Q^T        P = exp(scale S - lse)
//     dP^T = V dO^T      dS = P (dP - delta)
//     dV += P^T dO       dK += dS^T Q          (the scale of dK and dQ is applied at the end)
//   dQ += dS K
//
// A block that is partly visible goes through the same products over the visible lanes and keys
// only. If it also holds a value that is not finite, each sum is taken over exactly the pairs that
// may see each other: 0 * NaN is NaN, so a zero weight alone would not keep it out.
#pragma once

#include "cpu/backward_tile.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward {

// One block of keys as the products read and write it.
template <class Unit>
struct KeyBlock {
  const float* keys = nullptr;       // [kBlockK][head_packed]
  const float* values = nullptr;     // [kBlockK][value_packed]
  const float* key_lanes = nullptr;  // [kBlockK / kElements][head_lanes]
  float* dk = nullptr;               // [kBlockK][head_lanes]
  float* dv = nullptr;               // [kBlockK][value_lanes]
  std::int64_t first_key = 0;
  bool finite = true;  // all of K
};

// C[m][0..lanes) += sum over units u < depth of A[m * a_row + u * a_depth] B[u][0..lanes), for the
// kTileRows rows of a tile. Rows of B and C are `lanes` apart.
template <class Unit, int vecs>
FLASHATTN_INLINE void add_product_columns(std::int64_t depth, const float* A, std::ptrdiff_t a_row,
                                          std::ptrdiff_t a_depth, const float* B, float* C,
                                          std::int64_t lanes) {
  Vec acc[kTileRows][vecs];
  load_tile(C, lanes, acc);
  multiply<Unit>(depth, A, a_row, a_depth, B, lanes, acc);
  store_tile(C, lanes, acc);
}

template <class Unit>
FLASHATTN_INLINE void add_product(std::int64_t depth, const float* A, std::ptrdiff_t a_row,
                                  std::ptrdiff_t a_depth, const float* B, float* C,
                                  std::int64_t lanes) {
  std::int64_t d = 0;
  for (; lanes - d >= (kTileVecs + 2) * kLanes || lanes - d == kTileVecs * kLanes;
       d += kTileVecs * kLanes) {
    add_product_columns<Unit, kTileVecs>(depth, A, a_row, a_depth, B + d, C + d, lanes);
  }
  // What is left is shared out so that no narrow tile, bound by latency, remains of five vectors.
  for (std::int64_t left = (lanes - d) / kLanes; left > 0; left = (lanes - d) / kLanes) {
    if (kTileVecs > 3 && (left == 3 || left == 5)) {
      add_product_columns<Unit, 3>(depth, A, a_row, a_depth, B + d, C + d, lanes);
      d += 3 * kLanes;
    } else if (left >= 2) {
      add_product_columns<Unit, 2>(depth, A, a_row, a_depth, B + d, C + d, lanes);
      d += 2 * kLanes;
    } else {
      add_product_columns<Unit, 1>(depth, A, a_row, a_depth, B + d, C + d, lanes);
      d += kLanes;
    }
  }
}

// C[0..lanes) += sum over the elements e of `range` of A[e] B[e][0..lanes), one row alone. A unit
// that straddles an end of the range enters with its other element cleared in B (A's is 0 there).
template <class Unit>
FLASHATTN_INLINE void add_row_product(Interval range, const float* A, std::ptrdiff_t a_depth,
                                      const float* B, float* C, std::int64_t lanes) {
  if (range.begin >= range.end) return;
  constexpr std::int64_t elements = Unit::kElements;
  const std::int64_t first = range.begin / elements;
  const std::int64_t last = (range.end + elements - 1) / elements;
  for (std::int64_t d = 0; d < lanes; d += kLanes) {
    Vec acc = load(C + d);
    for (std::int64_t u = first; u < last; ++u) {
      VecI b = bits_of(load(B + u * lanes + d));
      if constexpr (elements == 2) {
        if (2 * u < range.begin) b &= broadcast(static_cast<std::int32_t>(0xffff0000U));
        if (2 * u + 2 > range.end) b &= broadcast(std::int32_t{0x0000ffff});
      }
      acc = Unit::multiply_add(acc, broadcast(A[u * a_depth]), vec_of_bits(b));
    }
    store(C + d, acc);
  }
}

FLASHATTN_INLINE Interval clip(Interval x, std::int64_t first, std::int64_t count) {
  const std::int64_t begin = x.begin - first > 0 ? x.begin - first : 0;
  const std::int64_t end = x.end - first < count ? x.end - first : count;
  return {begin, end > begin ? end : begin};
}

// dV += P^T dO and dK += dS^T Q for the keys of one tile, over the query rows of `rows`.
template <class Unit>
FLASHATTN_INLINE void add_key_gradients(const BackwardShape<Unit>& shape, const QueryBlock<Unit>& q,
                                        const KeyBlock<Unit>& k, std::int64_t key, Interval rows) {
  constexpr std::int64_t elements = Unit::kElements;
  const std::int64_t first = rows.begin / elements;
  const std::int64_t depth = (rows.end + elements - 1) / elements - first;
  const float* ds = elements == 1 ? q.ds + key * kBlockQ : q.ds_units;
  add_product<Unit>(depth, q.p_units + first, kBlockQ / elements, 1,
                    q.dout_rows + first * shape.value_lanes, k.dv + key * shape.value_lanes,
                    shape.value_lanes);
  add_product<Unit>(depth, ds + first, kBlockQ / elements, 1, q.q_rows + first * shape.head_lanes,
                    k.dk + key * shape.head_lanes, shape.head_lanes);
}

// The same, each key over exactly the rows that see it.
template <class Unit>
FLASHATTN_INLINE void add_key_gradients_exactly(const BackwardShape<Unit>& shape,
                                                const Visibility& visibility,
                                                const QueryBlock<Unit>& q, const KeyBlock<Unit>& k,
                                                std::int64_t key) {
  constexpr std::int64_t elements = Unit::kElements;
  const float* ds = elements == 1 ? q.ds + key * kBlockQ : q.ds_units;
  for (std::int64_t m = 0; m < kTileRows; ++m) {
    const std::int64_t at = k.first_key + key + m;
    const Interval rows = clip(visibility.rows_of_keys(at, at + 1), q.first_row, q.rows);
    add_row_product<Unit>(rows, q.p_units + m * kBlockQ / elements, 1, q.dout_rows,
                          k.dv + (key + m) * shape.value_lanes, shape.value_lanes);
    add_row_product<Unit>(rows, ds + m * kBlockQ / elements, 1, q.q_rows,
                          k.dk + (key + m) * shape.head_lanes, shape.head_lanes);
  }
}

// dQ += dS K for the rows of one tile, over the keys of `keys` (counted from the block's first).
template <class Unit>
FLASHATTN_INLINE void add_query_gradients(const BackwardShape<Unit>& shape,
                                          const QueryBlock<Unit>& q, const KeyBlock<Unit>& k,
                                          std::int64_t row, Interval keys) {
  constexpr std::int64_t elements = Unit::kElements;
  const std::int64_t first = keys.begin / elements;
  const std::int64_t depth = (keys.end + elements - 1) / elements - first;
  add_product<Unit>(depth, q.ds + first * kBlockQ + row, 1, kBlockQ,
                    k.key_lanes + first * shape.head_lanes, q.dq + row * shape.head_lanes,
                    shape.head_lanes);
}

// Every row of the block sees every key of it.
template <class Unit>
FLASHATTN_NOINLINE void add_visible_block(const BackwardShape<Unit>& shape, float scale,
                                          const QueryBlock<Unit>& q, const KeyBlock<Unit>& k) {
  for (std::int64_t key = 0; key < kBlockK; key += kTileRows) {
    score_tiles<Unit, false>(shape, k.keys + key * shape.head_packed,
                             k.values + key * shape.value_packed, scale, q, key, 0,
                             kBlockQ / kLanes);
    add_key_gradients(shape, q, k, key, {0, kBlockQ});
  }
  for (std::int64_t row = 0; row < kBlockQ; row += kTileRows) {
    add_query_gradients(shape, q, k, row, {0, kBlockK});
  }
}

// The keys that each lane sees, for the masks of score_tile; lanes without a row see none.
template <class Unit>
FLASHATTN_INLINE void set_lane_keys(const Visibility& visibility, const QueryBlock<Unit>& q,
                                    std::int64_t first_key) {
  for (std::int64_t i = 0; i < kBlockQ; ++i) {
    Interval keys{0, 0};
    if (i < q.rows) keys = clip(visibility.keys_of_row(q.first_row + i), first_key, kBlockK);
    q.key_begin[i] = static_cast<std::int32_t>(keys.begin);
    q.key_end[i] = static_cast<std::int32_t>(keys.end);
  }
}

// Some rows of the block see some keys of it.
template <class Unit>
FLASHATTN_NOINLINE void add_mixed_block(const BackwardShape<Unit>& shape, float scale,
                                        const Visibility& visibility, const QueryBlock<Unit>& q,
                                        const KeyBlock<Unit>& k) {
  constexpr std::int64_t lane_group = kLanes * Unit::kElements;
  set_lane_keys(visibility, q, k.first_key);
  for (std::int64_t key = 0; key < kBlockK; key += kTileRows) {
    const std::int64_t at = k.first_key + key;
    const Interval rows = clip(visibility.rows_of_keys(at, at + kTileRows), q.first_row, q.rows);
    if (rows.begin >= rows.end) continue;
    score_tiles<Unit, true>(
        shape, k.keys + key * shape.head_packed, k.values + key * shape.value_packed, scale, q, key,
        rows.begin / lane_group * Unit::kElements, round_up(rows.end, lane_group) / kLanes);
    if (q.finite) {
      add_key_gradients(shape, q, k, key, rows);
    } else {
      add_key_gradients_exactly(shape, visibility, q, k, key);
    }
  }
  for (std::int64_t row = 0; row < q.rows; row += kTileRows) {
    const std::int64_t at = q.first_row + row;
    const std::int64_t end = row + kTileRows < q.rows ? at + kTileRows : q.first_row + q.rows;
    const Interval keys = clip(visibility.keys_of_rows(at, end), k.first_key, kBlockK);
    if (keys.begin >= keys.end) continue;
    if (k.finite) {
      add_query_gradients(shape, q, k, row, keys);
      continue;
    }
    for (std::int64_t m = at; m < end; ++m) {
      add_row_product<Unit>(clip(visibility.keys_of_row(m), k.first_key, kBlockK),
                            q.ds + m - q.first_row, kBlockQ, k.key_lanes,
                            q.dq + (m - q.first_row) * shape.head_lanes, shape.head_lanes);
    }
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward
