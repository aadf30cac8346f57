// The gradient of an additive mask: dS, summed over every axis along which the mask was broadcast.
// A pass of its own, because dS tiles of different heads and rows may meet in one element: a task
// owns a region of dmask and computes the dS of all scores that belong to it once more, in the
// order
//
//   for each batch entry, kv head, chunk of keys: pack the chunk
//     for each head of the group, block of rows, block of keys:
//       part += dS        (over the region's rows, keys, or both, where dmask has one for all)
//     total += part
//
// so that neither threads nor regions change a bit, sums are sums of sums, and the memory of a task
// depends on its region alone. Relies on backward_modified.h for dS.
#pragma once

#include "cpu/backward_modified.h"
#include "cpu/backward_rows.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward {

// Keys that are packed at a time.
constexpr std::int64_t kMaskChunkKeys = kMaskRegionBlocks * kBlockK;

// Sums of dS over one region: by block of rows, then block of keys, [key][lane].
struct MaskSums {
  bool one_row = false;        // dmask has one row for all: lanes are summed at the end
  bool one_key = false;        // dmask has one key for all: a block is one row of lanes
  std::int64_t first_row = 0;  // of the region
  std::int64_t first_key = 0;
  std::int64_t key_blocks = 0;  // between blocks of rows
  std::int64_t block_floats = 0;
  std::int64_t floats = 0;  // of all blocks
  float* total = nullptr;
  float* part = nullptr;  // of one head and chunk; total itself where that is one block
  float* keys = nullptr;  // [kBlockQ], of one block, where one_key

  static FLASHATTN_INLINE MaskSums carve(const AttentionJob& job, const MaskRegion& region,
                                         Carver& carver) {
    const Interval rows = region.rows;
    const Interval keys = region.keys;
    MaskSums sums;
    sums.one_row = job.dmask.rows == 1;
    sums.one_key = job.dmask.keys == 1;
    sums.first_row = rows.begin;
    sums.first_key = keys.begin;
    sums.key_blocks = sums.one_key ? 1 : (keys.end - keys.begin + kBlockK - 1) / kBlockK;
    sums.block_floats = (sums.one_key ? 1 : kBlockK) * kBlockQ;
    const std::int64_t row_blocks =
        sums.one_row ? 1 : (rows.end - rows.begin + kBlockQ - 1) / kBlockQ;
    sums.floats = row_blocks * sums.key_blocks * sums.block_floats;
    sums.total = carver.floats(sums.floats);
    sums.part = sums.one_row || sums.one_key ? carver.floats(sums.floats) : sums.total;
    sums.keys = carver.floats(kBlockQ);
    return sums;
  }

  // Where in total, or part, the block of (row, key) is summed.
  FLASHATTN_INLINE std::int64_t block_at(std::int64_t row, std::int64_t key) const {
    const std::int64_t row_block = one_row ? 0 : (row - first_row) / kBlockQ;
    const std::int64_t key_block = one_key ? 0 : (key - first_key) / kBlockK;
    return (row_block * key_blocks + key_block) * block_floats;
  }

  // What the tiles of a block add to: part, or the sum over the block's keys that finish_block
  // adds.
  FLASHATTN_INLINE float* of_block(std::int64_t row, std::int64_t key) const {
    if (!one_key) return part + block_at(row, key);
    zero_units(keys, kBlockQ);
    return keys;
  }
  FLASHATTN_INLINE void finish_block(std::int64_t row, std::int64_t key) const {
    if (!one_key) return;
    float* const to = part + block_at(row, key);
    for (std::int64_t i = 0; i < kBlockQ; i += kLanes) store(to + i, load(to + i) + load(keys + i));
  }
  FLASHATTN_INLINE void start_head() const {
    if (part != total) zero_units(part, floats);
  }
  FLASHATTN_INLINE void finish_head() const {
    if (part == total) return;
    for (std::int64_t i = 0; i < floats; i += kLanes) {
      store(total + i, load(total + i) + load(part + i));
    }
  }
};

// Tiles that add dS to sums, in the form that score_partial_strip takes.
template <class Unit>
struct MaskGradientTiles {
  static constexpr int kLeastVecs = 1;
  ModifiedTiles<Unit> tiles;
  const QueryBlock<Unit>& q;
  const KeyBlock<Unit>& k;
  float* sums = nullptr;  // [kBlockK][kBlockQ], or [kBlockQ] where one_key
  bool one_key = false;

  FLASHATTN_INLINE bool begin_strip(std::int64_t strip, Interval rows) {
    return tiles.begin_strip(strip, rows);
  }
  FLASHATTN_INLINE bool need_score_gradients() const { return true; }
  template <int vecs>
  FLASHATTN_INLINE void weights(TilePlace at) const {
    tiles.template weights<vecs>(at);
  }
  template <int vecs>
  FLASHATTN_INLINE void score_gradients(TilePlace at) const {
    Vec ds[kTileRows][vecs];
    tiles.mask_gradients(at, ds);
    if (!one_key) {
      float* const to = sums + at.key * kBlockQ + at.lane;
      Vec sum[kTileRows][vecs];
      load_tile(to, kBlockQ, sum);
      add_tile(ds, sum);
      store_tile(to, kBlockQ, sum);
      return;
    }
    FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) {
      float* const to = sums + at.lane + n * kLanes;
      store(to, load(to) + ((ds[0][n] + ds[1][n]) + (ds[2][n] + ds[3][n])));
    }
  }
};

// What a task works with beside its sums.
template <class Unit>
struct ChunkWork {
  BackwardShape<Unit> shape;  // of one chunk of keys, no other gradient asked for
  PackedKeys<Unit> packed;
  QueryBlock<Unit> q;
  ModifiedScratch scratch;

  static FLASHATTN_INLINE ChunkWork carve(const AttentionJob& job, Carver& carver) {
    ChunkWork work;
    work.shape = BackwardShape<Unit>::of(job);
    work.shape.keys = kMaskChunkKeys;
    work.shape.wants_dq = work.shape.wants_dk = work.shape.wants_dv = false;
    work.shape.wants_slopes = false;
    work.packed = PackedKeys<Unit>::carve(work.shape, carver);
    work.q = QueryBlock<Unit>::carve(work.shape, carver);
    work.scratch = ModifiedScratch::carve(carver);
    return work;
  }

  // The block of keys at `key`, which is packed at row `at`.
  FLASHATTN_INLINE KeyBlock<Unit> key_block(std::int64_t key, std::int64_t at) const {
    return {.keys = packed.keys + at * shape.head_packed,
            .values = packed.values + at * shape.value_packed,
            .first_key = key};
  }
};

// The rows of one head that a task is at, and the packed chunk.
struct MaskPlace {
  std::int64_t batch = 0;
  std::int64_t head = 0;
  Interval keys;               // of the chunk, whole blocks
  std::int64_t first_key = 0;  // packed first
};

// dS of one block of loaded rows against one block of keys.
template <class Unit>
FLASHATTN_NOINLINE void add_mask_block(const Visibility& visibility,
                                       MaskGradientTiles<Unit>& block) {
  for (std::int64_t strip = 0; strip < kBlockK; strip += kStripKeys) {
    Interval rows[kStripTiles];
    score_partial_strip(block.tiles.shape, visibility, block, strip, rows);
  }
}

// dS of one block of rows against the chunk. The rows are loaded when a key is found that they see.
template <class Unit>
FLASHATTN_INLINE void add_mask_rows(const AttentionJob& job, const MaskPlace& at, Interval rows,
                                    ChunkWork<Unit>& work, const MaskSums& sums) {
  LaneModifiers<kBlockQ> modifiers;
  const ModifiedRows<Unit> loaded{work.shape, work.q, modifiers, work.scratch, at.batch, at.head};
  bool is_loaded = false;
  for (std::int64_t key = at.keys.begin; key < at.keys.end; key += kBlockK) {
    if (!may_see(job, at.batch, at.head, rows, {key, key + kBlockK})) continue;
    if (!is_loaded) {
      load_query_block(job, work.shape, at.batch, at.head, rows.begin, work.q);
      start_rows(job, loaded);
      is_loaded = true;
    }
    const KeyBlock<Unit> k = work.key_block(key, key - at.first_key);
    MaskGradientTiles<Unit> block{.tiles = tiles_of(job, loaded, k),
                                  .q = work.q,
                                  .k = k,
                                  .sums = sums.of_block(rows.begin, key),
                                  .one_key = sums.one_key};
    add_mask_block(job.visibility[at.batch], block);
    sums.finish_block(rows.begin, key);
  }
}

// One kv head's heads that the region covers, against one chunk of keys.
template <class Unit>
FLASHATTN_INLINE void add_mask_heads(const AttentionJob& job, const MaskRegion& region,
                                     const PackedPlace& place, ChunkWork<Unit>& work,
                                     const MaskSums& sums) {
  const Interval chunk{place.first_key, place.first_key + kMaskChunkKeys < region.keys.end
                                            ? place.first_key + kMaskChunkKeys
                                            : region.keys.end};
  const Interval seen =
      job.visibility[place.batch].keys_of_rows(region.rows.begin, region.rows.end);
  const Interval keys{(seen.begin > chunk.begin ? seen.begin : chunk.begin) / kBlockK * kBlockK,
                      seen.end < chunk.end ? seen.end : chunk.end};
  if (keys.begin >= keys.end) return;
  pack_key_range(job, work.shape, place, keys, work.packed);
  const Interval heads = clip(region.heads, place.kv_head * job.heads_per_kv, job.heads_per_kv);
  for (std::int64_t g = heads.begin; g < heads.end; ++g) {
    const MaskPlace at{.batch = place.batch,
                       .head = place.kv_head * job.heads_per_kv + g,
                       .keys = keys,
                       .first_key = place.first_key};
    sums.start_head();
    for (std::int64_t row = region.rows.begin; row < region.rows.end; row += kBlockQ) {
      const std::int64_t end = row + kBlockQ < region.rows.end ? row + kBlockQ : region.rows.end;
      add_mask_rows(job, at, {row, end}, work, sums);
    }
    sums.finish_head();
  }
}

// to[0..count) = from[0..count), `count` elements stride apart.
FLASHATTN_INLINE void write_mask_row(const float* from, std::int64_t count, const MaskGradient& to,
                                     std::int64_t first) {
  if (to.dtype == DType::kFloat64) {
    auto* const items = static_cast<double*>(to.data) + first;
    for (std::int64_t i = 0; i < count; ++i) {
      items[i * to.key_stride] = static_cast<double>(from[i]);
    }
  } else {
    auto* const items = static_cast<float*>(to.data) + first;
    for (std::int64_t i = 0; i < count; ++i) items[i * to.key_stride] = from[i];
  }
}

// Lanes [0, count) of one key's sums, which are rows of dmask: summed, or one below the other.
FLASHATTN_INLINE float sum_lanes(const float* lanes) {
  Vec sum{};
  for (std::int64_t i = 0; i < kBlockQ; i += kLanes) sum += load(lanes + i);
  float total = 0.0F;
  FLASHATTN_UNROLL for (int i = 0; i < kLanes; ++i) total += sum[i];
  return total;
}

// One block of sums, [keys][kBlockQ], into dmask: its rows [rows.begin, rows.end) and keys
// likewise, `first` being the element of its first row and key.
static inline void write_mask_block(const float* sums, const MaskGradient& dmask,
                                    std::int64_t first, std::int64_t rows, std::int64_t keys) {
  alignas(64) float staged[kBlockQ * kBlockK];
  if (dmask.rows == 1) {
    for (std::int64_t j = 0; j < keys; ++j) staged[j] = sum_lanes(sums + j * kBlockQ);
    return write_mask_row(staged, keys, dmask, first);
  }
  transpose_units(reinterpret_cast<const char*>(sums), kBlockQ * 4, keys, kBlockK, kBlockQ, staged,
                  kBlockK);
  for (std::int64_t i = 0; i < rows; ++i) {
    write_mask_row(staged + i * kBlockK, keys, dmask, first + i * dmask.row_stride);
  }
}

static inline void write_mask_sums(const AttentionJob& job, const MaskRegion& region,
                                   const MaskSums& sums) {
  const MaskGradient& dmask = job.dmask;
  const std::int64_t plane = (dmask.batches == 1 ? 0 : region.batches.begin * dmask.batch_stride) +
                             (dmask.heads == 1 ? 0 : region.heads.begin * dmask.head_stride);
  const std::int64_t row_end = sums.one_row ? region.rows.begin + 1 : region.rows.end;
  const std::int64_t key_end = sums.one_key ? region.keys.begin + 1 : region.keys.end;
  for (std::int64_t row = region.rows.begin; row < row_end; row += kBlockQ) {
    for (std::int64_t key = region.keys.begin; key < key_end; key += kBlockK) {
      const std::int64_t first = plane + (sums.one_row ? 0 : row * dmask.row_stride) +
                                 (sums.one_key ? 0 : key * dmask.key_stride);
      write_mask_block(sums.total + sums.block_at(row, key), dmask, first,
                       row_end - row < kBlockQ ? row_end - row : kBlockQ,
                       key_end - key < kBlockK ? key_end - key : kBlockK);
    }
  }
}

template <class Unit>
static void sum_mask_region(const AttentionJob& job, const MaskRegion& region, void* memory) {
  Carver carver{.base = static_cast<char*>(memory)};
  auto work = ChunkWork<Unit>::carve(job, carver);
  const auto sums = MaskSums::carve(job, region, carver);
  zero_units(sums.total, sums.floats);
  for (std::int64_t batch = region.batches.begin; batch < region.batches.end; ++batch) {
    const std::int64_t last = (region.heads.end - 1) / job.heads_per_kv;
    for (std::int64_t kv = region.heads.begin / job.heads_per_kv; kv <= last; ++kv) {
      for (std::int64_t key = region.keys.begin; key < region.keys.end; key += kMaskChunkKeys) {
        if (is_ending(job)) return;
        add_mask_heads(job, region, {.batch = batch, .kv_head = kv, .first_key = key}, work, sums);
      }
    }
  }
  write_mask_sums(job, region, sums);
}

template <class Unit>
FLASHATTN_INLINE std::int64_t mask_scratch_of(const AttentionJob& job, const MaskRegion& region) {
  Carver carver;
  ChunkWork<Unit>::carve(job, carver);
  MaskSums::carve(job, region, carver);
  return carver.used;
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward
