// The sum of exp(s - lse) over the keys of a row, which is 1 but for the rounding of lse: what rows
// divide their weights by where a float32 cannot hold log(sum) beside the largest score
// (weight_sums.h says which). Scores are computed as the gradients' own weights are, key block
// after key block. Relies on backward_modified.h and, for the buffers, on backward_mask.h.
#pragma once

#include "cpu/backward_mask.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward {

// Tiles that add their weights to the sums of the lanes, in the form that score_partial_strip
// takes.
template <class Unit, class Tiles>
struct WeightSumTiles {
  static constexpr int kLeastVecs = 1;
  Tiles tiles;
  const QueryBlock<Unit>& q;
  const KeyBlock<Unit>& k;
  float* sums = nullptr;  // [kBlockQ], of one block of keys

  FLASHATTN_INLINE bool begin_strip(std::int64_t strip, Interval rows) {
    return tiles.begin_strip(strip, rows);
  }
  FLASHATTN_INLINE bool need_score_gradients() const { return false; }
  template <int vecs>
  FLASHATTN_INLINE void weights(TilePlace at) const {
    tiles.template weights<vecs>(at);
    Vec p[kTileRows][vecs];
    load_tile(q.p + at.strip_key * kBlockQ + at.lane, kBlockQ, p);
    FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
      float* const to = sums + at.lane + n * kLanes;
      store(to, load(to) + ((p[0][n] + p[1][n]) + (p[2][n] + p[3][n])));
    }
  }
  template <int vecs>
  FLASHATTN_INLINE void score_gradients(TilePlace) const {}
};

// total += the weights of one block of keys.
template <class Unit, class Tiles>
FLASHATTN_NOINLINE void add_block_weights(const BackwardShape<Unit>& shape,
                                          const Visibility& visibility, const Tiles& tiles,
                                          const KeyBlock<Unit>& k, float* total) {
  alignas(64) float sums[kBlockQ] = {};
  WeightSumTiles<Unit, Tiles> block{.tiles = tiles, .q = tiles.q, .k = k, .sums = sums};
  for (std::int64_t strip = 0; strip < kBlockK; strip += kStripKeys) {
    Interval rows[kStripTiles];
    score_partial_strip(shape, visibility, block, strip, rows);
  }
  for (std::int64_t i = 0; i < kBlockQ; i += kLanes)
    store(total + i, load(total + i) + load(sums + i));
}

template <class Unit>
static void sum_row_weights(const AttentionJob& job, const HeadRows& at, float* sums,
                            void* memory) {
  Carver carver{.base = static_cast<char*>(memory)};
  auto work = ChunkWork<Unit>::carve(job, carver);
  load_query_block(job, work.shape, at.batch, at.head, at.first_row, work.q);
  LaneModifiers<kBlockQ> modifiers;
  const ModifiedRows<Unit> loaded{work.shape, work.q, modifiers, work.scratch, at.batch, at.head};
  const bool modified = has_modifiers(job);
  if (modified) start_rows(job, loaded);
  modifiers.drops = false;  // lse knows nothing of dropout
  zero_units(sums, kBlockQ);
  const Visibility& visibility = job.visibility[at.batch];
  const Interval rows{at.first_row, at.first_row + work.q.rows};
  const Interval seen = visibility.keys_of_rows(rows.begin, rows.end);
  const PackedPlace place{.batch = at.batch, .kv_head = at.head / job.heads_per_kv};
  for (std::int64_t key = seen.begin / kBlockK * kBlockK; key < seen.end; key += kBlockK) {
    if (!may_see(job, at.batch, at.head, rows, {key, key + kBlockK})) continue;
    pack_key_range(job, work.shape,
                   {.batch = place.batch, .kv_head = place.kv_head, .first_key = key},
                   {key, key + kBlockK}, work.packed);
    const KeyBlock<Unit> k = work.key_block(key, 0);
    if (modified) {
      add_block_weights(work.shape, visibility, tiles_of(job, loaded, k), k, sums);
    } else {
      set_lane_keys(visibility, work.q, key);
      const PlainTiles<Unit, true> tiles{work.shape, work.q, k, job.scale * kLog2E};
      add_block_weights(work.shape, visibility, tiles, k, sums);
    }
  }
  if (job.sinks.data == nullptr) return;
  const float sink = job.sinks.at(at.batch, at.head);
  for (std::int64_t i = 0; i < kBlockQ; i += kLanes) {
    store(sums + i, load(sums + i) + sink_weight(work.q, sink, i));
  }
}

template <class Unit>
FLASHATTN_INLINE std::int64_t weight_scratch_of(const AttentionJob& job) {
  Carver carver;
  ChunkWork<Unit>::carve(job, carver);
  return carver.used;
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward
