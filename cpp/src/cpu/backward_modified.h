// Blocks of a call whose scores are modified: softcap, ALiBi, mask, dropout (modifiers.h), sinks.
// The same products over the same strips as backward_block.h; only the tiles differ.
//
//   S = modified scale K Q^T        P = exp(S - lse), 0 where excluded
//   dP = R V dO^T                   dS = P (dP - delta)          R: 0 where dropped, else 1 / (1 -
//   p) dV += (P R)^T dO                dK += (C dS)^T Q             C: the slope of the softcap dQ
//   += (C dS) K                  slope sums -= dS |distance|
//
// dS itself, before C, is the gradient of the mask and what the slopes' gradient sums.
#pragma once

#include "cpu/backward_block.h"
#include "cpu/modifiers.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward {

static_assert(kBiasKeys == kStripKeys, "a strip's bias is made in one go");

// What the tiles of a strip need beside the query block's own arrays.
struct ModifiedScratch {
  float* bias = nullptr;          // [kStripKeys][kBlockQ]
  float* keep = nullptr;          // [kStripKeys][kBlockQ], R
  float* cap_slope = nullptr;     // [kStripKeys][kBlockQ], C
  float* block_slopes = nullptr;  // [kBlockQ], sum of dS |distance| over a key block
  float* slopes = nullptr;        // [kBlockQ], over the query block's keys

  static FLASHATTN_INLINE ModifiedScratch carve(Carver& carver) {
    ModifiedScratch scratch;
    scratch.bias = carver.floats(kStripKeys * kBlockQ);
    scratch.keep = carver.floats(kStripKeys * kBlockQ);
    scratch.cap_slope = carver.floats(kStripKeys * kBlockQ);
    scratch.block_slopes = carver.floats(kBlockQ);
    scratch.slopes = carver.floats(kBlockQ);
    return scratch;
  }
};

// exp(s - lse) / sum. The subtraction comes first and the degree is always the higher, as in
// forward; a sum_log2 of 0 changes no bit. A
// weight past the largest power of two, of an lse that is not of these scores, becomes that power.
FLASHATTN_INLINE Vec modified_weight(Vec s, Vec lse, Vec sum_log2) {
  const Vec x = (s - lse) * broadcast(kLog2E) - sum_log2;
  return exp2<6>(select(x > broadcast(127.0F), broadcast(127.0F), x));
}

// The tiles of one block, in the form that score_strip and add_partial_block take.
template <class Unit>
struct ModifiedTiles {
  static constexpr int kLeastVecs = 1;
  const BackwardShape<Unit>& shape;
  const QueryBlock<Unit>& q;
  const KeyBlock<Unit>& k;
  const LaneModifiers<kBlockQ>& modifiers;
  const ModifiedScratch& scratch;
  bool intervals = false;  // whether some lane does not see every key of the block, mask aside
  bool masked = false;     // whether the mask says anything about the block
  Bias bias{};             // of the current strip

  // Prepares the strip for the lanes of `rows`; false if the mask leaves nothing of it.
  FLASHATTN_INLINE bool begin_strip(std::int64_t strip, Interval rows) {
    bias = {};
    if (masked) {
      switch (fill_bias(modifiers.mask, k.first_key + strip, scratch.bias, bias)) {
        case TileVisibility::kNone:
          return false;
        case TileVisibility::kAll:
          bias = {};
          break;
        case TileVisibility::kMixed:
          break;
      }
    }
    if (modifiers.drops) draw_keep(strip, rows);
    return true;
  }

  FLASHATTN_INLINE bool need_score_gradients() const {
    return shape.wants_dq || shape.wants_dk || shape.wants_slopes;
  }

  // P, and what dV is summed from.
  template <int vecs>
  FLASHATTN_INLINE void weights(TilePlace at) const {
    Vec acc[kTileRows][vecs];
    dot_tile<Unit>(shape.head_units, k.keys + at.key * shape.head_packed, shape.head_packed,
                   q.q_columns + at.lane, kBlockQ, acc);
    Vec cap_slope[kTileRows][vecs];
    modify_scores(modifiers, tile_of(at), acc, cap_slope);
    const std::int64_t here = at.strip_key * kBlockQ + at.lane;
    if (modifiers.cap != 0.0F) store_tile(scratch.cap_slope + here, kBlockQ, cap_slope);
    FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
      const Vec lse = load(q.lse + at.lane + n * kLanes);
      const Vec sum_log2 = load(q.sum_log2 + at.lane + n * kLanes);
      FLASHATTN_UNROLL for (int m = 0; m < kTileRows; ++m) {
        acc[m][n] = modified_weight(acc[m][n], lse, sum_log2);
      }
    }
    exclude(at, acc);
    store_tile(q.p + here, kBlockQ, acc);
    if (!shape.wants_dv) return;
    if (modifiers.drops) multiply_by_keep(at, acc);
    if constexpr (Unit::kElements == 2) {
      store_by_query<Unit>(q.p_units, at, acc);
    } else if (modifiers.drops) {
      store_tile(q.p_units + here, kBlockQ, acc);
    }
  }

  // dS.
  template <int vecs>
  FLASHATTN_INLINE void mask_gradients(TilePlace at, Vec (&ds)[kTileRows][vecs]) const {
    dot_tile<Unit>(shape.value_units, k.values + at.key * shape.value_packed, shape.value_packed,
                   q.dout_columns + at.lane, kBlockQ, ds);
    if (modifiers.drops) multiply_by_keep(at, ds);
    FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
      const Vec delta = load(q.delta + at.lane + n * kLanes);
      FLASHATTN_UNROLL for (int m = 0; m < kTileRows; ++m) {
        ds[m][n] =
            load(q.p + (at.strip_key + m) * kBlockQ + at.lane + n * kLanes) * (ds[m][n] - delta);
      }
    }
    exclude(at, ds);
  }

  template <int vecs>
  FLASHATTN_INLINE void score_gradients(TilePlace at) const {
    Vec ds[kTileRows][vecs];
    mask_gradients(at, ds);
    if (shape.wants_slopes) add_slopes(at, ds);
    if (modifiers.cap != 0.0F) {
      Vec cap_slope[kTileRows][vecs];
      load_tile(scratch.cap_slope + at.strip_key * kBlockQ + at.lane, kBlockQ, cap_slope);
      // Selected once more: an excluded score may have been NaN, and its slope with it.
      FLASHATTN_UNROLL for (int m = 0; m < kTileRows; ++m) {
        FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) ds[m][n] *= cap_slope[m][n];
      }
      exclude(at, ds);
    }
    store_score_gradients<Unit>(q, at, ds);
  }

 private:
  FLASHATTN_INLINE ModifiedTile tile_of(TilePlace at) const {
    ModifiedTile tile{.lane = static_cast<int>(at.lane), .key = static_cast<int>(at.key)};
    if (bias.at != nullptr) {
      tile.bias = {.at = bias.at + at.strip_key * bias.key_stride, .key_stride = bias.key_stride};
    }
    return tile;
  }

  // 0 where the lane may not see the key, whatever was there.
  template <int vecs>
  FLASHATTN_INLINE void exclude(TilePlace at, Vec (&x)[kTileRows][vecs]) const {
    if (intervals) {
      FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
        FLASHATTN_UNROLL for (int m = 0; m < kTileRows; ++m) {
          x[m][n] = select(visible(q, at, m, n), x[m][n], Vec{});
        }
      }
    }
    if (bias.at == nullptr) return;
    const float* const of_tile = bias.at + at.strip_key * bias.key_stride + at.lane;
    FLASHATTN_UNROLL for (int m = 0; m < kTileRows; ++m) {
      FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
        const Vec b = load(of_tile + m * bias.key_stride + n * kLanes);
        x[m][n] = select(b == broadcast(-kInfinity), Vec{}, x[m][n]);
      }
    }
  }

  template <int vecs>
  FLASHATTN_INLINE void multiply_by_keep(TilePlace at, Vec (&x)[kTileRows][vecs]) const {
    FLASHATTN_UNROLL for (int m = 0; m < kTileRows; ++m) {
      FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
        x[m][n] *= load(scratch.keep + (at.strip_key + m) * kBlockQ + at.lane + n * kLanes);
      }
    }
  }

  template <int vecs>
  FLASHATTN_INLINE void add_slopes(TilePlace at, const Vec (&ds)[kTileRows][vecs]) const {
    FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
      Vec sum{};
      FLASHATTN_UNROLL for (int m = 0; m < kTileRows; ++m) {
        sum += ds[m][n] * distance(modifiers, tile_of(at), m, n);
      }
      float* const to = scratch.block_slopes + at.lane + n * kLanes;
      store(to, load(to) + sum);
    }
  }

  // R of a strip over the vectors of lanes that hold `rows`.
  FLASHATTN_INLINE void draw_keep(std::int64_t strip, Interval rows) const {
    const Vec scale = broadcast(modifiers.keep_scale);
    for (std::int64_t lane = rows.begin / kLanes * kLanes; lane < rows.end; lane += kLanes) {
      DropoutRun<kBlockQ> run(modifiers.dropout, static_cast<int>(lane), k.first_key + strip);
      for (std::int64_t key = 0; key < kStripKeys; key += kTileRows) {
        VecI keep[kTileRows];
        run.next(keep);
        FLASHATTN_UNROLL for (int m = 0; m < kTileRows; ++m) {
          store(scratch.keep + (key + m) * kBlockQ + lane, select(keep[m], scale, Vec{}));
        }
      }
    }
  }
};

// One block of rows of one head, loaded, with what modifies its scores.
template <class Unit>
struct ModifiedRows {
  const BackwardShape<Unit>& shape;
  const QueryBlock<Unit>& q;
  LaneModifiers<kBlockQ>& modifiers;
  const ModifiedScratch& scratch;
  std::int64_t batch = 0;
  std::int64_t head = 0;
};

// To be called when the query block has been loaded.
template <class Unit>
FLASHATTN_NOINLINE void start_rows(const AttentionJob& job, const ModifiedRows<Unit>& rows) {
  const std::int64_t last = rows.q.rows - 1;
  const auto place_of = [&](int lane) __attribute__((always_inline)) {
    return LanePlace{.head = rows.head, .row = rows.q.first_row + (lane < last ? lane : last)};
  };
  set_lanes(job, rows.batch, place_of, rows.modifiers);
  zero_units(rows.scratch.slopes, kBlockQ);
}

// What intervals and the classes of the mask's tiles leave of a block of keys for the rows.
FLASHATTN_INLINE bool may_see(const AttentionJob& job, std::int64_t batch, std::int64_t head,
                              Interval rows, Interval keys) {
  return job.visibility[batch].tile(rows.begin, rows.end, keys.begin, keys.end) !=
             TileVisibility::kNone &&
         job.mask_tiles.of(batch, head, rows, keys) != TileVisibility::kNone;
}

// The tiles of the rows against a block of keys that they may see.
template <class Unit>
FLASHATTN_INLINE ModifiedTiles<Unit> tiles_of(const AttentionJob& job,
                                              const ModifiedRows<Unit>& rows,
                                              const KeyBlock<Unit>& k) {
  const QueryBlock<Unit>& q = rows.q;
  const Visibility& visibility = job.visibility[rows.batch];
  const Interval all{q.first_row, q.first_row + q.rows};
  const Interval keys{k.first_key, k.first_key + kBlockK};
  ModifiedTiles<Unit> tiles{rows.shape, q, k, rows.modifiers, rows.scratch};
  tiles.intervals =
      q.rows < kBlockQ || q.dead != 0 ||
      visibility.tile(all.begin, all.end, keys.begin, keys.end) != TileVisibility::kAll;
  tiles.masked = job.mask.data != nullptr &&
                 job.mask_tiles.of(rows.batch, rows.head, all, keys) != TileVisibility::kAll;
  set_first_key(k.first_key, rows.modifiers);
  if (tiles.intervals) set_lane_keys(visibility, q, k.first_key);
  return tiles;
}

// Which pairs of the block may see each other: as find_seen_pairs, and the mask.
template <class Unit>
FLASHATTN_NOINLINE void find_unmasked_pairs(const Visibility& visibility,
                                            const ModifiedTiles<Unit>& tiles, SeenPairs& seen) {
  find_seen_pairs(visibility, tiles.q, tiles.k.first_key, seen);
  if (!tiles.masked) return;
  for (std::int64_t j = 0; j < kBlockK; ++j) {
    for (std::int64_t i = 0; i < kBlockQ; ++i) {
      if ((seen.rows[j] >> i & 1) == 0) continue;
      const float bias = tiles.modifiers.mask.at(static_cast<int>(i), tiles.k.first_key + j);
      if (bias == -kInfinity) seen.rows[j] &= ~(std::uint64_t{1} << i);
    }
  }
}

template <class Unit>
FLASHATTN_NOINLINE void add_modified_block(const Visibility& visibility, ModifiedTiles<Unit>& tiles,
                                           const BlockAhead& ahead) {
  const QueryBlock<Unit>& q = tiles.q;
  const KeyBlock<Unit>& k = tiles.k;
  SeenPairs seen;
  if (!q.finite || !k.finite) find_unmasked_pairs(visibility, tiles, seen);
  if (tiles.shape.wants_slopes) zero_units(tiles.scratch.block_slopes, kBlockQ);
  add_partial_block(tiles.shape, visibility, seen, tiles, ahead);
  if (!tiles.shape.wants_slopes) return;
  for (std::int64_t i = 0; i < kBlockQ; i += kLanes) {
    float* const to = tiles.scratch.slopes + i;
    store(to, load(to) + load(tiles.scratch.block_slopes + i));
  }
}

FLASHATTN_INLINE double sum_of_lanes(const float* lanes) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < kBlockQ; ++i) sum += static_cast<double>(lanes[i]);
  return sum;
}

// The weight of the sink in lanes [i, i + kLanes).
template <class Unit>
FLASHATTN_INLINE Vec sink_weight(const QueryBlock<Unit>& q, float sink, std::int64_t i) {
  return exp2<6>((broadcast(sink) - load(q.lse + i)) * broadcast(kLog2E) - load(q.sum_log2 + i));
}

// - sum_i p_i delta_i with p_i = exp(sink - lse_i). A row without weights has no sink that counts.
template <class Unit>
FLASHATTN_NOINLINE double sink_gradient(const QueryBlock<Unit>& q, float sink) {
  alignas(64) float terms[kBlockQ];
  for (std::int64_t i = 0; i < kBlockQ; i += kLanes) {
    store(terms + i, sink_weight(q, sink, i) * load(q.delta + i));
  }
  for (std::int64_t i = 0; i < kBlockQ; ++i) {
    if (i >= q.rows || (q.dead >> i & 1) != 0) terms[i] = 0.0F;
  }
  return -sum_of_lanes(terms);
}

// What block of rows number `index` adds to the gradients of slopes and sinks.
template <class Unit>
FLASHATTN_NOINLINE void write_partials(const AttentionJob& job, const ModifiedRows<Unit>& rows,
                                       std::int64_t index, const HeadPartials& partials) {
  const std::int64_t at = (rows.batch * job.query_heads + rows.head) * partials.blocks + index;
  if (partials.slopes != nullptr) partials.slopes[at] = -sum_of_lanes(rows.scratch.slopes);
  if (partials.sinks != nullptr) {
    partials.sinks[at] = sink_gradient(rows.q, job.sinks.at(rows.batch, rows.head));
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward
