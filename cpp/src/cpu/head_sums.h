// The gradients of ALiBi slopes and sinks as they are gathered: one number per block of query rows,
// written by whichever task has the block, then added in ascending order of batch entry and block,
// so that no bit depends on the threads. Owns the numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/backward_table.h"
#include "cpu/job.h"

namespace flashattn::cpu {

class HeadSums {
 public:
  explicit HeadSums(const AttentionJob& job);
  HeadSums(const HeadSums&) = delete;
  HeadSums& operator=(const HeadSums&) = delete;

  // Where tasks write; 0 until they do.
  HeadPartials partials();
  // Writes job.dslopes and job.dsinks, as far as they are asked for.
  void write() const;

 private:
  void write(const HeadGradients& to, const std::vector<double>& partials) const;

  const AttentionJob& job_;
  const std::int64_t blocks_;   // of query rows, of the longest entry
  std::vector<double> slopes_;  // [batch][query_heads][blocks_], or empty
  std::vector<double> sinks_;   // likewise
};

}  // namespace flashattn::cpu
