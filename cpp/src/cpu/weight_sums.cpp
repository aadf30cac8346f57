// See weight_sums.h.
#include "cpu/weight_sums.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "cpu/scratch.h"

namespace flashattn::cpu {
namespace {

// From here on the rounding of lse counts beside that of the results: 4e-6 of a weight for float32,
// 2^-12 where results are rounded to 11 bits or 8.
float least_coarse_lse(DType dtype) { return dtype == DType::kFloat32 ? 64.0F : 4096.0F; }

// How far from 0, in units of |lse|, rounding may bring the log of a row's sum: the rounding of lse
// and of a score's product with the scale, and the passes' different order in adding a score's
// head_dim products, which strays as the square root of their number.
float most_of_lse(std::int64_t head_dim) {
  return 0x1p-24F * (4.0F + 2.0F * std::sqrt(static_cast<float>(head_dim)));
}

bool is_coarse(float lse, float least) { return std::isfinite(lse) && std::fabs(lse) >= least; }

float log2_of_sum(float sum, float most) {
  if (!(sum > 0.0F) || !(std::fabs(std::log(sum)) <= most)) return 0.0F;
  return std::log2(sum);
}

}  // namespace

void WeightSums::find_blocks(const AttentionJob& job) {
  const float least = least_coarse_lse(job.dtype);
  for (std::int64_t batch = 0; batch < job.batch; ++batch) {
    const std::int64_t rows = entry_seqlen_q(job, batch);
    for (std::int64_t head = 0; head < job.query_heads; ++head) {
      const float* const lse = job.lse.head(batch, head);
      for (std::int64_t first = 0; first < rows; first += kBackwardBlockQ) {
        const std::int64_t end = std::min(first + kBackwardBlockQ, rows);
        bool coarse = false;
        for (std::int64_t i = first; i < end; ++i) {
          coarse |= is_coarse(lse[i * job.lse.row_stride], least);
        }
        if (coarse) blocks_.push_back({.batch = batch, .head = head, .first_row = first});
      }
    }
  }
}

// Rows lie as in lse, whose rows of packed sequences share one axis.
void WeightSums::allocate(const AttentionJob& job) {
  std::int64_t batches = job.lse.places.entries == nullptr ? job.batch : 1;
  std::int64_t rows = job.seqlen_q;
  for (std::int64_t batch = 0; job.lse.places.entries != nullptr && batch < job.batch; ++batch) {
    const RowPlace& place = job.lse.places[batch];
    batches = std::max(batches, place.batch + 1);
    rows = std::max(rows, place.row + entry_seqlen_q(job, batch));
  }
  log2_.resize(static_cast<std::size_t>(batches * job.query_heads * rows));
  table_ = {.data = log2_.data(),
            .batch_stride = job.query_heads * rows,
            .head_stride = rows,
            .row_stride = 1,
            .places = job.lse.places};
}

WeightSums::WeightSums(const AttentionJob& job, const BackwardKernels& kernels, ThreadPool& pool) {
  find_blocks(job);
  if (blocks_.empty()) return;
  allocate(job);
  const float least = least_coarse_lse(job.dtype);
  const float most = most_of_lse(job.head_dim);
  pool.parallel_for(std::ssize(blocks_), [&](std::int64_t index) {
    if (is_ending(job)) return;
    const HeadRows& block = blocks_[static_cast<std::size_t>(index)];
    const AttentionJob own = job_of_entry(job, block.batch);
    alignas(64) float sums[kBackwardBlockQ];
    kernels.sum_weights(own, block, sums,
                        thread_scratch(static_cast<std::size_t>(kernels.weight_scratch(own))));
    const std::int64_t count = std::min(kBackwardBlockQ, own.seqlen_q - block.first_row);
    const float* const lse =
        job.lse.head(block.batch, block.head) + block.first_row * job.lse.row_stride;
    float* const to = table_.head(block.batch, block.head) + block.first_row;
    for (std::int64_t i = 0; i < count; ++i) {
      const float own_lse = lse[i * job.lse.row_stride];
      to[i] = is_coarse(own_lse, least) ? log2_of_sum(sums[i], most * std::fabs(own_lse)) : 0.0F;
    }
  });
}

}  // namespace flashattn::cpu
