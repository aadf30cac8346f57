// A block of query rows against a block of keys: the five matrix products of the backward pass.
//
//   for each strip of kStripKeys keys:
//     S^T = K Q^T        P = exp(scale S - lse)
//     dP^T = V dO^T      dS = P (dP - delta)
//     dV += P^T dO       dK += dS^T Q          (the scale of dK and dQ is applied at the end)
//   dQ += dS K
//
// A block that is partly visible goes through the same products over the visible lanes and keys
// only. If it also holds a value that is not finite, each sum is taken over exactly the pairs that
// may see each other: 0 * NaN is NaN, so a zero weight alone would not keep it out.
#pragma once

#include "cpu/backward_prefetch.h"
#include "cpu/backward_product.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward {

// One block of keys as the products read and write it.
template <class Unit>
struct KeyBlock {
  const float* keys = nullptr;       // [kBlockK][head_packed]
  const float* values = nullptr;     // [kBlockK][value_packed]
  const float* key_lanes = nullptr;  // [kBlockK / kElements][head_row]
  float* dk = nullptr;               // [kBlockK][head_lanes], null where not asked for
  float* dv = nullptr;               // [kBlockK][value_lanes], likewise
  std::int64_t first_key = 0;
  bool finite = true;  // all of K
};

// x - first, clipped to [0, count).
FLASHATTN_INLINE Interval clip(Interval x, std::int64_t first, std::int64_t count) {
  const std::int64_t begin = x.begin - first > 0 ? x.begin - first : 0;
  const std::int64_t end = x.end - first < count ? x.end - first : count;
  return {begin, end > begin ? end : begin};
}

// The rows of the block, counted from its first, that see some of the `count` keys from `key` on.
template <class Unit>
FLASHATTN_INLINE Interval rows_seeing(const Visibility& visibility, const QueryBlock<Unit>& q,
                                      std::int64_t key, std::int64_t count) {
  return clip(visibility.rows_of_keys(key, key + count), q.first_row, q.rows);
}

// Fetches the rows of K and V, or of the sums dK and dV, of the tile at `key`, counted from this
// block's first and possibly in the next block. Where a tile takes only a part of each row at a
// time, the processor does not see the sequence itself: at head_dim 128 in float32 and 4096 keys
// this made the difference between 72 and 99 GFLOP/s. Past the last key it is a hint without
// effect.
template <class Unit>
FLASHATTN_INLINE void fetch_keys(const BackwardShape<Unit>& shape, const KeyBlock<Unit>& k,
                                 std::int64_t key) {
  if (!shape.in_column_groups()) return;
  prefetch_floats(k.keys + key * shape.head_packed, kTileRows * shape.head_packed);
  prefetch_floats(k.values + key * shape.value_packed, kTileRows * shape.value_packed);
}

template <class Unit>
FLASHATTN_INLINE void fetch_sums(const BackwardShape<Unit>& shape, const KeyBlock<Unit>& k,
                                 std::int64_t key) {
  if (!shape.in_column_groups()) return;
  if (shape.wants_dk) {
    prefetch_floats(k.dk + key * shape.head_lanes, kTileRows * shape.head_lanes);
  }
  if (shape.wants_dv) {
    prefetch_floats(k.dv + key * shape.value_lanes, kTileRows * shape.value_lanes);
  }
}

// The tiles of a call without score modifiers. masked: some row may not see some key.
template <class Unit, bool masked>
struct PlainTiles {
  static constexpr int kLeastVecs = masked ? 1 : kTileVecs;
  const BackwardShape<Unit>& shape;
  const QueryBlock<Unit>& q;
  const KeyBlock<Unit>& k;
  float scale_log2 = 0.0F;

  FLASHATTN_INLINE bool need_score_gradients() const { return shape.wants_dq || shape.wants_dk; }
  FLASHATTN_INLINE bool begin_strip(std::int64_t, Interval) const { return true; }
  template <int vecs>
  FLASHATTN_INLINE void weights(TilePlace at) const {
    weight_tile<Unit, masked, vecs>(shape, k.keys, scale_log2, q, at);
  }
  template <int vecs>
  FLASHATTN_INLINE void score_gradients(TilePlace at) const {
    score_gradient_tile<Unit, masked, vecs>(shape, k.values, q, at);
  }
};

// P and dS of the strip's tiles, each over the vectors of lanes that its rows take. Tiles says how
// one tile is computed: PlainTiles or one of the same form.
template <class Unit, class Tiles>
FLASHATTN_INLINE void score_strip(const BackwardShape<Unit>& shape, const KeyBlock<Unit>& k,
                                  const Tiles& tiles, std::int64_t strip,
                                  const Interval (&rows)[kStripTiles]) {
  constexpr std::int64_t group = kLanes * Unit::kElements;
  for (std::int64_t t = 0; t < kStripTiles; ++t) {
    if (rows[t].begin >= rows[t].end) continue;
    const TilePlace at{.strip_key = t * kTileRows, .key = strip + t * kTileRows};
    fetch_keys(shape, k, at.key + kStripKeys);
    for_lane_tiles<Unit, Tiles::kLeastVecs>(
        at, rows[t].begin / group * Unit::kElements, round_up(rows[t].end, group) / kLanes,
        [&](auto vecs, TilePlace place) __attribute__((always_inline)) {
          tiles.template weights<decltype(vecs)::value>(place);
        });
  }
  if (!tiles.need_score_gradients()) return;
  for (std::int64_t t = 0; t < kStripTiles; ++t) {
    if (rows[t].begin >= rows[t].end) continue;
    const TilePlace at{.strip_key = t * kTileRows, .key = strip + t * kTileRows};
    fetch_sums(shape, k, at.key + kStripKeys);
    for_lane_tiles<Unit, Tiles::kLeastVecs>(
        at, rows[t].begin / group * Unit::kElements, round_up(rows[t].end, group) / kLanes,
        [&](auto vecs, TilePlace place) __attribute__((always_inline)) {
          tiles.template score_gradients<decltype(vecs)::value>(place);
        });
  }
}

// dV += P^T dO and dK += dS^T Q for the keys of a strip, each tile over its own rows.
template <class Unit>
FLASHATTN_INLINE void add_key_gradients(const BackwardShape<Unit>& shape, const QueryBlock<Unit>& q,
                                        const KeyBlock<Unit>& k, std::int64_t strip,
                                        const Interval (&rows)[kStripTiles]) {
  constexpr std::ptrdiff_t row_units = kBlockQ / Unit::kElements;
  if (shape.wants_dv) {
    add_product<Unit>({.A = q.p_units,
                       .a_tile = kTileRows * row_units,
                       .a_row = row_units,
                       .a_depth = 1,
                       .B = q.dout_rows,
                       .b_row = shape.value_row,
                       .C = k.dv + strip * shape.value_lanes,
                       .lanes = shape.value_lanes,
                       .ranges = rows,
                       .tiles = kStripTiles});
  }
  if (shape.wants_dk) {
    add_product<Unit>({.A = q.ds_of_strip(strip),
                       .a_tile = kTileRows * row_units,
                       .a_row = row_units,
                       .a_depth = 1,
                       .B = q.q_rows,
                       .b_row = shape.head_row,
                       .C = k.dk + strip * shape.head_lanes,
                       .lanes = shape.head_lanes,
                       .ranges = rows,
                       .tiles = kStripTiles});
  }
}

// Which pairs of a block may see each other: bit i of rows[j] is query row i and key j, both
// counted from the block's first.
struct SeenPairs {
  static_assert(kBlockQ == 64 && kBlockK == 64);
  std::uint64_t rows[kBlockK];

  // The keys of row i, a bit each.
  FLASHATTN_INLINE std::uint64_t keys(std::int64_t i) const {
    std::uint64_t bits = 0;
    for (std::int64_t j = 0; j < kBlockK; ++j) bits |= (rows[j] >> i & 1) << j;
    return bits;
  }
};

// Bits [x.begin, x.end).
FLASHATTN_INLINE std::uint64_t bits_of_interval(Interval x) {
  if (x.begin >= x.end) return 0;
  return ~std::uint64_t{0} >> (64 - (x.end - x.begin)) << x.begin;
}

template <class Unit>
FLASHATTN_NOINLINE void find_seen_pairs(const Visibility& visibility, const QueryBlock<Unit>& q,
                                        std::int64_t first_key, SeenPairs& seen) {
  for (std::int64_t j = 0; j < kBlockK; ++j) {
    seen.rows[j] = bits_of_interval(rows_seeing(visibility, q, first_key + j, 1)) & ~q.dead;
  }
}

// The same sums, each key over exactly the rows that see it.
template <class Unit>
FLASHATTN_NOINLINE void add_key_gradients_exactly(const BackwardShape<Unit>& shape,
                                                  const SeenPairs& seen, const QueryBlock<Unit>& q,
                                                  const KeyBlock<Unit>& k, std::int64_t strip) {
  constexpr std::ptrdiff_t row_units = kBlockQ / Unit::kElements;
  for (std::int64_t m = 0; m < kStripKeys; ++m) {
    const std::uint64_t rows = seen.rows[strip + m];
    if (shape.wants_dv) {
      add_row_product<Unit>(rows, q.p_units + m * row_units, 1, q.dout_rows, shape.value_row,
                            k.dv + (strip + m) * shape.value_lanes, shape.value_lanes);
    }
    if (shape.wants_dk) {
      add_row_product<Unit>(rows, q.ds_of_strip(strip) + m * row_units, 1, q.q_rows, shape.head_row,
                            k.dk + (strip + m) * shape.head_lanes, shape.head_lanes);
    }
  }
}

// dQ += dS K, each tile of rows over its own keys, counted from the block's first.
template <class Unit>
FLASHATTN_INLINE void add_query_gradients(const BackwardShape<Unit>& shape,
                                          const QueryBlock<Unit>& q, const KeyBlock<Unit>& k,
                                          const Interval (&keys)[kMaxTiles]) {
  if (!shape.wants_dq) return;
  add_product<Unit>({.A = q.ds,
                     .a_tile = kTileRows,
                     .a_row = 1,
                     .a_depth = kBlockQ,
                     .B = k.key_lanes,
                     .b_row = shape.head_row,
                     .C = q.dq,
                     .lanes = shape.head_lanes,
                     .ranges = keys,
                     .tiles = kMaxTiles});
}

// Every row of the block sees every key of it.
template <class Unit>
FLASHATTN_NOINLINE void add_visible_block(const BackwardShape<Unit>& shape, float scale_log2,
                                          const QueryBlock<Unit>& q, const KeyBlock<Unit>& k,
                                          const BlockAhead& ahead) {
  Interval rows[kStripTiles];
  for (Interval& range : rows) range = {0, kBlockQ};
  const PlainTiles<Unit, false> tiles{shape, q, k, scale_log2};
  for (std::int64_t strip = 0; strip < kBlockK; strip += kStripKeys) {
    ahead.fetch(strip / kStripKeys, kBlockK / kStripKeys);
    score_strip(shape, k, tiles, strip, rows);
    add_key_gradients(shape, q, k, strip, rows);
  }
  Interval keys[kMaxTiles];
  for (Interval& range : keys) range = {0, kBlockK};
  add_query_gradients(shape, q, k, keys);
}

// The keys that each lane sees, counted from first_key, for the masks of the tiles; lanes without a
// row see none.
template <class Unit>
FLASHATTN_INLINE void set_lane_keys(const Visibility& visibility, const QueryBlock<Unit>& q,
                                    std::int64_t first_key) {
  for (std::int64_t i = 0; i < kBlockQ; ++i) {
    Interval keys{0, 0};
    if (i < q.rows && (q.dead >> i & 1) == 0)
      keys = clip(visibility.keys_of_row(q.first_row + i), first_key, kBlockK);
    q.key_begin[i] = static_cast<std::int32_t>(keys.begin);
    q.key_end[i] = static_cast<std::int32_t>(keys.end);
  }
}

// dQ of a partly visible block; seen: where K is not finite.
template <class Unit>
FLASHATTN_INLINE void add_mixed_query_gradients(const BackwardShape<Unit>& shape,
                                                const Visibility& visibility, const SeenPairs& seen,
                                                const QueryBlock<Unit>& q,
                                                const KeyBlock<Unit>& k) {
  if (k.finite) {
    Interval keys[kMaxTiles];
    for (std::int64_t t = 0; t < kMaxTiles; ++t) {
      const std::int64_t row = t * kTileRows;
      const std::int64_t end = row + kTileRows < q.rows ? row + kTileRows : q.rows;
      keys[t] =
          clip(visibility.keys_of_rows(q.first_row + row, q.first_row + end), k.first_key, kBlockK);
    }
    add_query_gradients(shape, q, k, keys);
    return;
  }
  if (!shape.wants_dq) return;
  for (std::int64_t m = 0; m < q.rows; ++m) {
    add_row_product<Unit>(seen.keys(m), q.ds + m, kBlockQ, k.key_lanes, shape.head_row,
                          q.dq + m * shape.head_lanes, shape.head_lanes);
  }
}

// A strip of which some rows see some keys, over the lanes that intervals leave each tile: `rows`,
// an output. False if nothing is left; what the strip's tiles would have written is garbage then.
template <class Unit, class Tiles>
FLASHATTN_INLINE bool score_partial_strip(const BackwardShape<Unit>& shape,
                                          const Visibility& visibility, Tiles& tiles,
                                          std::int64_t strip, Interval (&rows)[kStripTiles]) {
  const KeyBlock<Unit>& k = tiles.k;
  const Interval any = rows_seeing(visibility, tiles.q, k.first_key + strip, kStripKeys);
  if (any.begin >= any.end || !tiles.begin_strip(strip, any)) return false;
  for (std::int64_t t = 0; t < kStripTiles; ++t) {
    rows[t] = rows_seeing(visibility, tiles.q, k.first_key + strip + t * kTileRows, kTileRows);
  }
  score_strip(shape, k, tiles, strip, rows);
  return true;
}

// Some rows of the block see some keys of it. seen is read where Q, dO or K holds a value that is
// not finite.
template <class Unit, class Tiles>
FLASHATTN_INLINE void add_partial_block(const BackwardShape<Unit>& shape,
                                        const Visibility& visibility, const SeenPairs& seen,
                                        Tiles& tiles, const BlockAhead& ahead) {
  const QueryBlock<Unit>& q = tiles.q;
  const KeyBlock<Unit>& k = tiles.k;
  for (std::int64_t strip = 0; strip < kBlockK; strip += kStripKeys) {
    ahead.fetch(strip / kStripKeys, kBlockK / kStripKeys);
    Interval rows[kStripTiles];
    if (!score_partial_strip(shape, visibility, tiles, strip, rows)) {
      // dQ may still run over the strip's keys.
      zero_units(q.ds + strip / Unit::kElements * kBlockQ, kStripKeys / Unit::kElements * kBlockQ);
      continue;
    }
    if (q.finite) {
      add_key_gradients(shape, q, k, strip, rows);
    } else {
      add_key_gradients_exactly(shape, seen, q, k, strip);
    }
  }
  add_mixed_query_gradients(shape, visibility, seen, q, k);
}

template <class Unit>
FLASHATTN_NOINLINE void add_mixed_block(const BackwardShape<Unit>& shape, float scale_log2,
                                        const Visibility& visibility, const QueryBlock<Unit>& q,
                                        const KeyBlock<Unit>& k, const BlockAhead& ahead) {
  set_lane_keys(visibility, q, k.first_key);
  SeenPairs seen;
  if (!q.finite || !k.finite) find_seen_pairs(visibility, q, k.first_key, seen);
  PlainTiles<Unit, true> tiles{shape, q, k, scale_log2};
  add_partial_block(shape, visibility, seen, tiles, ahead);
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward
