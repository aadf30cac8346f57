// One block of queries against every key it sees: the online softmax of flash attention with the
// queries in the vector lanes.
//
//   Q^T, once                                      with the sign of scale     forward_rows.h
//   for each block of kBlockK keys:
//     S^T = K Q^T, row_max                         forward_scores.h
//     P^T = exp(scale * S^T - row_max), row_sum    forward_softmax.h
//     O^T = O^T * rescale + V^T P^T                forward_values.h
//   out = O / row_sum, lse = row_max + log(row_sum)
//
// With modifiers the scores are in natural units before the softmax: modifiers.h,
// forward_modified.h.
//
// K and V are read row-major as broadcasts and every maximum and sum runs down a lane, so nothing
// but Q and out is transposed and no reduction is horizontal.
#pragma once

#include "cpu/forward_pack.h"
#include "cpu/forward_prefetch.h"
#include "cpu/forward_rows.h"
#include "cpu/forward_softmax.h"
#include "cpu/forward_values.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

template <class Unit>
FLASHATTN_INLINE void start_rows(const BlockScratch<Unit>& scratch) {
  for (int lane = 0; lane < kBlockQ; lane += kLanes) {
    store(scratch.row_max + lane, broadcast(-kInfinity));
    store(scratch.row_max_log2 + lane, broadcast(-kInfinity));
    store(scratch.row_sum + lane, Vec{});
  }
}

// The part of a query block that a key block sees the same of: what the two kernels start with and
// how they turn a key block into weights. `modified` computes the scores and weights of a call with
// modifiers, in natural units; the plain kernel pays for none of it.
template <class Unit, bool modified>
struct BlockWeights;

template <class Unit>
struct BlockWeights<Unit, false> {
  float scale_log2;

  FLASHATTN_INLINE BlockWeights(const AttentionJob& job, const ForwardTask&, const QueryRows&,
                                const PackedHead<Unit>& kv, const BlockScratch<Unit>& scratch)
      : scale_log2(make_scale_positive<Unit>(job.scale, scratch.Q, kv.k_ld * kBlockQ)) {
    start_rows(scratch);
  }

  FLASHATTN_INLINE const ForwardModifiers* modifiers() const { return nullptr; }
  // Where a key block may start.
  static constexpr std::int64_t kKeyStep = kTileRows;
  // Whether the key block has to be visited at all.
  FLASHATTN_INLINE bool start_block(const AttentionJob&, const ForwardTask&, const QueryRows&,
                                    const KeyBlock&) {
    return true;
  }
  FLASHATTN_INLINE bool compute(const PackedHead<Unit>& kv, const BlockScratch<Unit>& scratch,
                                const VisibleLanes& lanes, const KeyBlock& block) const {
    score_block(kv, kv.k_ld, scratch, lanes, block, PlainScores{});
    return softmax_block(scratch, block, scale_log2);
  }
};

template <class Unit>
struct BlockWeights<Unit, true> {
  ForwardModifiers lane_modifiers;
  bool masked_block = false;

  FLASHATTN_INLINE BlockWeights(const AttentionJob& job, const ForwardTask& task,
                                const QueryRows& rows, const PackedHead<Unit>&,
                                const BlockScratch<Unit>& scratch) {
    set_forward_lanes(job, task, rows, lane_modifiers);
    start_modified_rows(job, task, rows, scratch);
  }

  FLASHATTN_INLINE const ForwardModifiers* modifiers() const { return &lane_modifiers; }
  static constexpr std::int64_t kKeyStep = kMaskTileKeys;
  FLASHATTN_INLINE bool start_block(const AttentionJob& job, const ForwardTask& task,
                                    const QueryRows& rows, const KeyBlock& block) {
    const TileVisibility mask = mask_class(job, task, rows, lane_modifiers, block);
    masked_block = mask == TileVisibility::kMixed;
    if (mask != TileVisibility::kNone) set_first_key(block.first_key, lane_modifiers);
    return mask != TileVisibility::kNone;
  }
  FLASHATTN_INLINE bool compute(const PackedHead<Unit>& kv, const BlockScratch<Unit>& scratch,
                                const VisibleLanes& lanes, const KeyBlock& block) const {
    score_block(kv, kv.k_ld, scratch, lanes, block,
                ModifiedScores{
                    .modifiers = lane_modifiers, .masked = masked_block, .scratch = scratch.bias});
    return modified_softmax_block(scratch, block, lane_modifiers);
  }
};

template <class Unit, bool modified>
static __attribute__((noinline)) void forward_block(const AttentionJob& job,
                                                    const ForwardTask& task) {
  PackedHead<Unit> kv(job, const_cast<void*>(task.packed));
  const std::int64_t kv_head = task.head / job.heads_per_kv;
  const Rows keys = rows_of(job.key, job.dtype, task.batch, kv_head);
  if (keys_lie_packed<Unit>(job, keys)) kv.K = reinterpret_cast<float*>(keys.base);
  const BlockScratch<Unit> scratch(job, task.scratch);
  const QueryRows rows(job, task);
  VisibleLanes lanes;
  find_visible_lanes(job.visibility[task.batch], rows, lanes);
  read_queries(job, task, rows, scratch);
  BlockWeights<Unit, modified> weights(job, task, rows, kv, scratch);

  const Rows values = rows_of(job.value, job.dtype, task.batch, kv_head);
  constexpr std::int64_t kKeyStep = BlockWeights<Unit, modified>::kKeyStep;
  const std::int64_t begin = lanes.keys.begin / kKeyStep * kKeyStep;
  // Rows that see nothing take no step: nothing may have been packed for them.
  const bool any = lanes.keys.begin < lanes.keys.end;
  const std::int64_t end = any ? round_up(lanes.keys.end, kTileRows) : begin;
  const std::int64_t steps = (end - begin + kBlockK - 1) / kBlockK;
  Prefetcher prefetcher;
  plan_prefetch(job, task, rows.count, prefetcher);
  prefetcher.spread_over(steps * prefetch_slots(kv));
  bool first = true;
  for (std::int64_t step = 0; step < steps; ++step) {
    const std::int64_t key = begin + step * kBlockK;
    KeyBlock block;
    find_key_block(lanes, key, end - key < kBlockK ? static_cast<int>(end - key) : kBlockK, block);
    if (!weights.start_block(job, task, rows, block)) continue;
    for (int lane = 0; lane < kBlockQ; lane += kLanes) {
      store(scratch.block_max + lane, load(scratch.row_max + lane));
    }
    const bool rose = weights.compute(kv, scratch, lanes, block);
    value_block(kv, scratch, block, first, rose, prefetcher);
    add_nonfinite_values(kv, values, job.value_dim, scratch, lanes, block, weights.modifiers());
    first = false;
  }
  if (first) zero_units(scratch.O, round_up(job.value_dim, kLanes) * kBlockQ);
  write_rows<Unit, modified>(job, task, rows, scratch);
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
