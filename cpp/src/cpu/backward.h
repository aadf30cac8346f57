// The backward kernels of one instruction set: what BackwardKernels' pointers lead to. One pass
// over the query blocks of a task, and inside it over the key blocks that the rows see; dQ is
// finished per query block, dK and dV are summed over the whole task. Relies on the other
// backward_*.h.
#pragma once

#include "cpu/backward_weight_sums.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward {

// Key block number `index`, its sums at 0 if this task has not touched it yet.
template <class Unit>
FLASHATTN_INLINE KeyBlock<Unit> key_block(const BackwardShape<Unit>& shape,
                                          const PackedKeys<Unit>& packed, const KeySums<Unit>& sums,
                                          std::int64_t index) {
  const std::int64_t key = index * kBlockK;
  const KeyBlock<Unit> block{.keys = packed.keys + key * shape.head_packed,
                             .values = packed.values + key * shape.value_packed,
                             .key_lanes = packed.key_lanes + key / Unit::kElements * shape.head_row,
                             .dk = shape.wants_dk ? sums.dk + key * shape.head_lanes : nullptr,
                             .dv = shape.wants_dv ? sums.dv + key * shape.value_lanes : nullptr,
                             .first_key = key,
                             .finite = packed.finite[index] != 0};
  if (sums.touched[index] == 0) {
    sums.touched[index] = 1;
    if (shape.wants_dk) zero_units(block.dk, kBlockK * shape.head_lanes);
    if (shape.wants_dv) zero_units(block.dv, kBlockK * shape.value_lanes);
  }
  return block;
}

// Calls body(number of a key block, its slices) for the key blocks that some row of q sees.
template <class Unit, class Body>
FLASHATTN_INLINE void for_key_blocks(const Visibility& visibility, const QueryBlock<Unit>& q,
                                     const RowsAhead& ahead, const Body& body) {
  const Interval keys = visibility.keys_of_rows(q.first_row, q.first_row + q.rows);
  const std::int64_t begin = keys.begin / kBlockK;
  const std::int64_t end = keys.begin < keys.end ? (keys.end + kBlockK - 1) / kBlockK : begin;
  for (std::int64_t i = begin; i < end; ++i) {
    body(i, BlockAhead{.rows = ahead, .block = i - begin, .blocks = end - begin});
  }
}

template <class Unit>
FLASHATTN_INLINE void add_key_blocks(const AttentionJob& job, const BackwardShape<Unit>& shape,
                                     const Visibility& visibility, const PackedKeys<Unit>& packed,
                                     const KeySums<Unit>& sums, const QueryBlock<Unit>& q,
                                     const RowsAhead& ahead) {
  const float scale_log2 = job.scale * kLog2E;
  for_key_blocks(visibility, q, ahead,
                 [&](std::int64_t i, const BlockAhead& slices) __attribute__((always_inline)) {
                   const TileVisibility tile = visibility.tile(q.first_row, q.first_row + q.rows,
                                                               i * kBlockK, (i + 1) * kBlockK);
                   if (tile == TileVisibility::kNone) return;
                   const KeyBlock<Unit> k = key_block(shape, packed, sums, i);
                   if (tile == TileVisibility::kAll && q.rows == kBlockQ && q.dead == 0) {
                     add_visible_block(shape, scale_log2, q, k, slices);
                   } else {
                     add_mixed_block(shape, scale_log2, visibility, q, k, slices);
                   }
                 });
}

template <class Unit>
FLASHATTN_INLINE void add_modified_key_blocks(const AttentionJob& job,
                                              const ModifiedRows<Unit>& rows,
                                              const PackedKeys<Unit>& packed,
                                              const KeySums<Unit>& sums, const RowsAhead& ahead) {
  const Visibility& visibility = job.visibility[rows.batch];
  const Interval all{rows.q.first_row, rows.q.first_row + rows.q.rows};
  for_key_blocks(visibility, rows.q, ahead,
                 [&](std::int64_t i, const BlockAhead& slices) __attribute__((always_inline)) {
                   if (!may_see(job, rows.batch, rows.head, all, {i * kBlockK, (i + 1) * kBlockK}))
                     return;
                   const KeyBlock<Unit> k = key_block(rows.shape, packed, sums, i);
                   auto tiles = tiles_of(job, rows, k);
                   add_modified_block(visibility, tiles, slices);
                 });
}

// modified: the call has a score modifier.
template <class Unit, bool modified>
static void accumulate_blocks(const AttentionJob& job, const BackwardTask& task) {
  const auto shape = BackwardShape<Unit>::of(job);
  Carver packed_carver{.base = static_cast<char*>(const_cast<void*>(task.packed))};
  Carver sums_carver{.base = static_cast<char*>(task.sums)};
  Carver scratch_carver{.base = static_cast<char*>(task.scratch)};
  const auto packed = PackedKeys<Unit>::carve(shape, packed_carver);
  const auto sums = KeySums<Unit>::carve(shape, sums_carver);
  auto block = QueryBlock<Unit>::carve(shape, scratch_carver);
  const auto modified_scratch = ModifiedScratch::carve(scratch_carver);
  const Visibility visibility = job.visibility[task.batch];
  __builtin_memset(sums.touched, 0, static_cast<std::size_t>(shape.keys / kBlockK));
  for (std::int64_t g = 0; g < job.heads_per_kv; ++g) {
    const std::int64_t head = task.kv_head * job.heads_per_kv + g;
    for (std::int64_t i = task.blocks.first; i < task.blocks.end; i += task.blocks.step) {
      if (is_ending(job)) return;
      load_query_block(job, shape, task.batch, head, i * kBlockQ, block);
      const RowsAhead ahead = RowsAhead::of(job, task, g, i);
      if constexpr (modified) {
        LaneModifiers<kBlockQ> modifiers;
        const ModifiedRows<Unit> rows{shape, block, modifiers, modified_scratch, task.batch, head};
        start_rows(job, rows);
        if (shape.wants_scores()) add_modified_key_blocks(job, rows, packed, sums, ahead);
        write_partials(job, rows, i, task.partials);
      } else {
        add_key_blocks(job, shape, visibility, packed, sums, block, ahead);
      }
      write_dq(job, shape, task.batch, head, block);
    }
  }
}

template <class Unit>
FLASHATTN_INLINE BackwardSizes sizes_of(const AttentionJob& job) {
  const auto shape = BackwardShape<Unit>::of(job);
  Carver packed;
  Carver sums;
  Carver scratch;
  PackedKeys<Unit>::carve(shape, packed);
  KeySums<Unit>::carve(shape, sums);
  QueryBlock<Unit>::carve(shape, scratch);
  if (has_modifiers(job)) ModifiedScratch::carve(scratch);
  return {.packed = packed.used, .sums = sums.used, .scratch = scratch.used};
}

// The unit that the tensors of a job are multiplied in: pairs of bf16 where one instruction does
// that, else float32, to which float16 and bf16 are widened when they are packed.
FLASHATTN_INLINE bool in_bf16_pairs(const AttentionJob& job) {
#if defined(FLASHATTN_HAS_BF16_DOT)
  return job.dtype == DType::kBFloat16;
#else
  static_cast<void>(job);
  return false;
#endif
}

#if defined(FLASHATTN_HAS_BF16_DOT)
using HalfUnit = Bf16PairUnit;
#else
using HalfUnit = Float32Unit;
#endif

static BackwardSizes sizes(const AttentionJob& job) {
  return in_bf16_pairs(job) ? sizes_of<HalfUnit>(job) : sizes_of<Float32Unit>(job);
}

static void pack_keys(const AttentionJob& job, std::int64_t batch, std::int64_t kv_head,
                      Interval keys, void* packed) {
  in_bf16_pairs(job) ? pack_key_blocks<HalfUnit>(job, batch, kv_head, keys, packed)
                     : pack_key_blocks<Float32Unit>(job, batch, kv_head, keys, packed);
}

template <class Unit>
FLASHATTN_INLINE void accumulate_units(const AttentionJob& job, const BackwardTask& task) {
  has_modifiers(job) ? accumulate_blocks<Unit, true>(job, task)
                     : accumulate_blocks<Unit, false>(job, task);
}

static void accumulate(const AttentionJob& job, const BackwardTask& task) {
  in_bf16_pairs(job) ? accumulate_units<HalfUnit>(job, task)
                     : accumulate_units<Float32Unit>(job, task);
}

static void write_key_gradients(const AttentionJob& job, const BackwardSums& sums, Interval keys) {
  in_bf16_pairs(job) ? write_key_blocks<HalfUnit>(job, sums, keys)
                     : write_key_blocks<Float32Unit>(job, sums, keys);
}

static void write_mask_gradient(const AttentionJob& job, const MaskRegion& region, void* scratch) {
  in_bf16_pairs(job) ? sum_mask_region<HalfUnit>(job, region, scratch)
                     : sum_mask_region<Float32Unit>(job, region, scratch);
}

static std::int64_t mask_scratch(const AttentionJob& job, const MaskRegion& region) {
  return in_bf16_pairs(job) ? mask_scratch_of<HalfUnit>(job, region)
                            : mask_scratch_of<Float32Unit>(job, region);
}

static void sum_weights(const AttentionJob& job, const HeadRows& rows, float* sums, void* scratch) {
  in_bf16_pairs(job) ? sum_row_weights<HalfUnit>(job, rows, sums, scratch)
                     : sum_row_weights<Float32Unit>(job, rows, sums, scratch);
}

static std::int64_t weight_scratch(const AttentionJob& job) {
  return in_bf16_pairs(job) ? weight_scratch_of<HalfUnit>(job)
                            : weight_scratch_of<Float32Unit>(job);
}

constexpr BackwardKernels kKernels = {.sizes = sizes,
                                      .pack_keys = pack_keys,
                                      .accumulate = accumulate,
                                      .write_key_gradients = write_key_gradients,
                                      .write_mask_gradient = write_mask_gradient,
                                      .mask_scratch = mask_scratch,
                                      .sum_weights = sum_weights,
                                      .weight_scratch = weight_scratch};

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward
