// Fetches what a task will read next, slice by slice: a burst of prefetches would fill the
// miss buffers and stall the loads of the computation. Only hints: it may guess wrong.
#pragma once

#include "cpu/backward_layout.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward {

FLASHATTN_INLINE void prefetch_floats(const float* from, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += 16) __builtin_prefetch(from + i, 0, 2);
}

struct RowsAhead {
  // Q, O, dO of the query block that comes next, rows [query.begin, query.end).
  Rows q, out, dout;
  Interval query{0, 0};
  // K and V of the next task, the share [keys.begin, keys.end) of this query block.
  Rows k, v;
  Interval keys{0, 0};
  // What will be written: dQ of this block, and the share [written_keys) of dK and dV if this task
  // completes them.
  Rows dq, dk, dv;
  Interval written{0, 0};
  Interval written_keys{0, 0};
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;

  static FLASHATTN_INLINE RowsAhead of(const AttentionJob& job, const BackwardTask& task,
                                       std::int64_t g, std::int64_t index);

  // Slice `step` of `steps`.
  FLASHATTN_INLINE void fetch(std::int64_t step, std::int64_t steps) const {
    const Interval rows = slice(query, step, steps);
    prefetch_rows(q, rows.begin, rows.end - rows.begin, head_dim);
    prefetch_rows(out, rows.begin, rows.end - rows.begin, value_dim);
    prefetch_rows(dout, rows.begin, rows.end - rows.begin, value_dim);
    const Interval share = slice(keys, step, steps);
    prefetch_rows(k, share.begin, share.end - share.begin, head_dim);
    prefetch_rows(v, share.begin, share.end - share.begin, value_dim);
    const Interval target = slice(written, step, steps);
    prefetch_for_writing(dq, target, head_dim);
    const Interval sums = slice(written_keys, step, steps);
    prefetch_for_writing(dk, sums, head_dim);
    prefetch_for_writing(dv, sums, value_dim);
  }

 private:
  static FLASHATTN_INLINE void prefetch_for_writing(const Rows& rows, Interval which,
                                                    std::int64_t dim) {
    if (!rows.contiguous_rows()) return;
    for (std::int64_t r = which.begin; r < which.end; ++r) {
      for (std::int64_t byte = 0; byte < dim * rows.item_bytes(); byte += 64) {
        __builtin_prefetch(rows.row(r) + byte, 1, 2);
      }
    }
  }

  static FLASHATTN_INLINE Interval slice(Interval x, std::int64_t step, std::int64_t steps) {
    const std::int64_t length = x.end - x.begin;
    return {x.begin + length * step / steps, x.begin + length * (step + 1) / steps};
  }
};

// The slices of one key block, out of all that a query block visits.
struct BlockAhead {
  const RowsAhead& rows;
  std::int64_t block = 0;
  std::int64_t blocks = 1;

  // To be called before strip `strip` of `strips`. With many key blocks one slice per block is fine
  // enough, and the slices cost divisions.
  FLASHATTN_INLINE void fetch(std::int64_t strip, std::int64_t strips) const {
    constexpr std::int64_t kFewBlocks = 8;
    if (blocks <= kFewBlocks) {
      rows.fetch(block * strips + strip, blocks * strips);
    } else if (strip == 0) {
      rows.fetch(block, blocks);
    }
  }
};

// What follows query block `index` of head number g of the task's group.
FLASHATTN_INLINE RowsAhead RowsAhead::of(const AttentionJob& job, const BackwardTask& task,
                                         std::int64_t g, std::int64_t index) {
  std::int64_t batch = task.batch;
  std::int64_t kv_head = task.kv_head;
  std::int64_t next = index + task.blocks.step;
  std::int64_t member = g;
  if (next >= task.blocks.end) {
    next = task.blocks.first;
    if (++member == job.heads_per_kv) {
      member = 0;
      batch = task.next_batch;
      kv_head = task.next_kv_head;
    }
  }
  const std::int64_t head = kv_head * job.heads_per_kv + member;
  const std::int64_t first = next * kBlockQ;
  const std::int64_t last = first + kBlockQ < job.seqlen_q ? first + kBlockQ : job.seqlen_q;
  RowsAhead ahead;
  ahead.q = rows_of(job.query, job.dtype, batch, head);
  ahead.out = rows_of(job.out, job.dtype, batch, head);
  ahead.dout = rows_of(job.dout, job.dtype, batch, head);
  ahead.query = {first, last};
  ahead.k = rows_of(job.key, job.dtype, task.next_batch, task.next_kv_head);
  ahead.v = rows_of(job.value, job.dtype, task.next_batch, task.next_kv_head);
  const std::int64_t own_head = task.kv_head * job.heads_per_kv + g;
  const std::int64_t own = index * kBlockQ;
  ahead.dq = rows_of(job.dq, job.dtype, task.batch, own_head);
  ahead.written = {own, own + kBlockQ < job.seqlen_q ? own + kBlockQ : job.seqlen_q};
  if (task.whole_head) {
    const std::int64_t blocks =
        (task.blocks.end - task.blocks.first + task.blocks.step - 1) / task.blocks.step;
    const std::int64_t at = g * blocks + (index - task.blocks.first) / task.blocks.step;
    ahead.keys = slice({0, job.seqlen_k}, at, blocks * job.heads_per_kv);
    ahead.dk = rows_of(job.dk, job.dtype, task.batch, task.kv_head);
    ahead.dv = rows_of(job.dv, job.dtype, task.batch, task.kv_head);
    ahead.written_keys = ahead.keys;
  }
  ahead.head_dim = job.head_dim;
  ahead.value_dim = job.value_dim;
  return ahead;
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA::backward
