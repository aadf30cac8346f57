// See backward_mask_schedule.h.
#include "cpu/backward_mask_schedule.h"

#include <algorithm>
#include <cstddef>

#include "cpu/scratch.h"

namespace flashattn::cpu {
namespace {

// Regions for each thread, so that the ends of their work come close together.
constexpr std::int64_t kRegionsPerThread = 4;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Region `index` along an axis of `size` that dmask may have one element for.
Interval part_of(std::int64_t size, bool whole, std::int64_t step, std::int64_t index) {
  if (whole) return {0, size};
  return {index * step, std::min((index + 1) * step, size)};
}

}  // namespace

MaskGrid mask_grid(const AttentionJob& job, std::int64_t threads) {
  const MaskGradient& dmask = job.dmask;
  MaskGrid grid{.batches = dmask.batches, .heads = dmask.heads};
  for (std::int64_t blocks = kMaskRegionBlocks; blocks >= 1; blocks /= 2) {
    grid.rows = dmask.rows == 1 ? job.seqlen_q : blocks * kBackwardBlockQ;
    grid.keys = dmask.keys == 1 ? job.seqlen_k : blocks * kBackwardBlockK;
    grid.row_regions = ceil_div(job.seqlen_q, grid.rows);
    grid.key_regions = ceil_div(job.seqlen_k, grid.keys);
    if (threads == 1 || grid.regions() >= kRegionsPerThread * threads) break;
  }
  return grid;
}

MaskRegion mask_region(const AttentionJob& job, const MaskGrid& grid, std::int64_t index) {
  const std::int64_t key = index % grid.key_regions;
  index /= grid.key_regions;
  const std::int64_t row = index % grid.row_regions;
  index /= grid.row_regions;
  return {.batches = part_of(job.batch, grid.batches == 1, 1, index / grid.heads),
          .heads = part_of(job.query_heads, grid.heads == 1, 1, index % grid.heads),
          .rows = part_of(job.seqlen_q, grid.row_regions == 1, grid.rows, row),
          .keys = part_of(job.seqlen_k, grid.key_regions == 1, grid.keys, key)};
}

void run_mask_gradient(const AttentionJob& job, const BackwardKernels& kernels, ThreadPool& pool) {
  const MaskGrid grid = mask_grid(job, pool.threads());
  pool.parallel_for(grid.regions(), [&](std::int64_t index) {
    const MaskRegion region = mask_region(job, grid, index);
    std::byte* const scratch =
        thread_scratch(static_cast<std::size_t>(kernels.mask_scratch(job, region)));
    kernels.write_mask_gradient(job, region, scratch);
  });
}

}  // namespace flashattn::cpu
