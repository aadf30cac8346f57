// Fetches what this thread will touch next, a few rows at a time: a burst of prefetches would fill
// the miss buffers and stall the loads of the computation.
#pragma once

#include "cpu/forward_layout.h"
#include "cpu/forward_table.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// A walk over the cache lines of up to four runs of rows.
class Prefetcher {
 public:
  // Rows [begin, end) of dim elements each. Scattered elements are not worth the lines,
  // and pages not the looking up.
  FLASHATTN_INLINE void add(const Rows& rows, std::int64_t begin, std::int64_t end,
                            std::int64_t dim) {
    if (begin >= end || !rows.contiguous_rows() || rows.pages != nullptr) return;
    Run& run = runs_[count_++];
    run = {.row = rows.row(begin),
           .row_bytes = rows.row_bytes,
           .rows = end - begin,
           .bytes = dim * rows.item_bytes()};
    lines_ += run.rows * (run.bytes / kLine + 1);
  }

  // From now on all lines are spread over `slots` calls of advance().
  FLASHATTN_INLINE void spread_over(std::int64_t slots) {
    per_slot_ = slots > 0 ? (lines_ + slots - 1) / slots : 0;
  }

  FLASHATTN_INLINE void advance() {
    std::int64_t budget = per_slot_;
    while (budget > 0 && at_ < count_) {
      Run& run = runs_[at_];
      const char* row = run.row;
      std::int64_t rows = run.rows;
      for (; rows > 0 && budget > 0; --rows, row += run.row_bytes) {
        for (std::int64_t i = 0; i < run.bytes; i += kLine) __builtin_prefetch(row + i, 0, 2);
        budget -= run.bytes / kLine + 1;
      }
      run.row = row;
      run.rows = rows;
      if (rows == 0) ++at_;
    }
  }

 private:
  static constexpr std::int64_t kLine = 64;
  struct Run {
    const char* row;
    std::ptrdiff_t row_bytes;
    std::int64_t rows;
    std::int64_t bytes;
  };
  Run runs_[4];
  int count_ = 0;
  int at_ = 0;
  std::int64_t lines_ = 0;
  std::int64_t per_slot_ = 0;
};

// The rows of out that this block will write, then what the task says is next.
FLASHATTN_INLINE void plan_prefetch(const AttentionJob& job, const ForwardTask& task,
                                    std::int64_t rows, Prefetcher& prefetcher) {
  if (task.heads == 1) {
    prefetcher.add(rows_of(job.out, job.dtype, task.batch, task.head), task.first_row,
                   task.first_row + rows, job.value_dim);
  }
  if (task.ahead == nullptr) return;
  const ForwardAhead& ahead = *task.ahead;
  const Rows Q = rows_of(job.query, job.dtype, ahead.query_batch, ahead.query_head);
  prefetcher.add(Q, ahead.query_begin, ahead.query_end, job.head_dim);
  const Rows K = rows_of(job.key, job.dtype, ahead.batch, ahead.kv_head);
  prefetcher.add(K, ahead.key_begin, ahead.key_end, job.head_dim);
  const Rows V = rows_of(job.value, job.dtype, ahead.batch, ahead.kv_head);
  prefetcher.add(V, ahead.key_begin, ahead.key_end, job.value_dim);
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
