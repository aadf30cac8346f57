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
// K and V are read row-major as broadcasts and every maximum and sum runs down a lane, so nothing
// but Q and out is transposed and no reduction is horizontal.
#pragma once

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

template <class Unit>
static __attribute__((noinline)) void forward_block(const AttentionJob& job,
                                                    const ForwardTask& task) {
  const PackedHead<Unit> kv(job, const_cast<void*>(task.packed));
  const BlockScratch<Unit> scratch(job, task.scratch);
  const QueryRows rows(job, task);
  VisibleLanes lanes;
  find_visible_lanes(job.visibility[task.batch], rows, lanes);
  read_queries(job, task, rows, scratch);
  const float scale_log2 = make_scale_positive<Unit>(job.scale, scratch.Q, kv.k_ld * kBlockQ);
  start_rows(scratch);

  const Rows values = rows_of(job.value, job.dtype, task.batch, task.head / job.heads_per_kv);
  const std::int64_t begin = lanes.keys.begin / kTileRows * kTileRows;
  const std::int64_t end = round_up(lanes.keys.end, kTileRows);
  const std::int64_t steps = (end - begin + kBlockK - 1) / kBlockK;
  if (steps <= 0) zero_units(scratch.O, round_up(job.value_dim, kLanes) * kBlockQ);
  Prefetcher prefetcher;
  plan_prefetch(job, task, rows.count, prefetcher);
  prefetcher.spread_over(steps * prefetch_slots(kv));
  for (std::int64_t step = 0; step < steps; ++step) {
    const std::int64_t key = begin + step * kBlockK;
    KeyBlock block;
    find_key_block(lanes, key, end - key < kBlockK ? static_cast<int>(end - key) : kBlockK, block);
    for (int lane = 0; lane < kBlockQ; lane += kLanes) {
      store(scratch.block_max + lane, load(scratch.row_max + lane));
    }
    score_block(kv, kv.k_ld, scratch, lanes, block);
    const bool rose = softmax_block(scratch, block, scale_log2);
    value_block(kv, scratch, block, step == 0, rose, prefetcher);
    add_nonfinite_values(kv, values, job.value_dim, scratch, lanes, block);
  }
  write_rows(job, task, rows, scratch);
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
