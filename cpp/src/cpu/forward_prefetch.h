// Fetches what the next tasks of this thread will read, a slice per key block: a burst of
// prefetches would fill the miss buffers and stall the loads of the computation.
#pragma once

#include "cpu/forward_layout.h"
#include "cpu/forward_table.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// Slice `step` of `steps` of the range [begin, end).
FLASHATTN_INLINE Interval slice(std::int64_t begin, std::int64_t end, std::int64_t step,
                                std::int64_t steps) {
  const std::int64_t length = end > begin ? end - begin : 0;
  return {begin + length * step / steps, begin + length * (step + 1) / steps};
}

FLASHATTN_INLINE void prefetch_slice(const AttentionJob& job, const ForwardAhead& ahead,
                                     std::int64_t step, std::int64_t steps) {
  const Interval keys = slice(ahead.key_begin, ahead.key_end, step, steps);
  if (keys.begin < keys.end) {
    const Rows K = rows_of(job.key, job.dtype, ahead.batch, ahead.kv_head);
    const Rows V = rows_of(job.value, job.dtype, ahead.batch, ahead.kv_head);
    prefetch_rows(K, keys.begin, keys.end - keys.begin, job.head_dim);
    prefetch_rows(V, keys.begin, keys.end - keys.begin, job.value_dim);
  }
  const std::int64_t last = ahead.query_begin + kBlockQ;
  const Interval rows =
      slice(ahead.query_begin, last < job.seqlen_q ? last : job.seqlen_q, step, steps);
  if (rows.begin < rows.end) {
    const Rows Q = rows_of(job.query, job.dtype, ahead.query_batch, ahead.query_head);
    prefetch_rows(Q, rows.begin, rows.end - rows.begin, job.head_dim);
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
