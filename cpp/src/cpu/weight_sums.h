// Rows whose lse is so large that float32 rounds away what backward needs of it. lse = m + log(sum)
// is off by up to |lse| 2^-24, and so is, relatively, every weight exp(s - lse) of the row; where
// all keys of a row are at float32's least value, log(sum) is lost whole and each weight would come
// out as 1. Such rows have their weights summed once more and divided by the sum: log2 of it is
// kept per row. It costs one of backward's five products, for the blocks that hold such a row.
//
// lse may also be that of more keys than the call's (a ring's, which covers every part), where the
// weights rightly sum to less than 1. A sum is therefore used only as far as rounding of lse
// explains it. Owns the numbers; relies on the kernels for the sums.
#pragma once

#include <vector>

#include "cpu/backward_table.h"
#include "cpu/job.h"
#include "cpu/thread_pool.h"

namespace flashattn::cpu {

class WeightSums {
 public:
  WeightSums(const AttentionJob& job, const BackwardKernels& kernels, ThreadPool& pool);
  WeightSums(const WeightSums&) = delete;
  WeightSums& operator=(const WeightSums&) = delete;

  // (batch, query head, row), 0 for every row that is as it should be; null if all are.
  RowScalars log2() const { return table_; }

 private:
  void find_blocks(const AttentionJob& job);
  void allocate(const AttentionJob& job);

  std::vector<HeadRows> blocks_;  // of rows with at least one such row
  std::vector<float> log2_;
  RowScalars table_;
};

}  // namespace flashattn::cpu
