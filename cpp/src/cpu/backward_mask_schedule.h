// The order of work of the mask's gradient: dmask divided into regions, each written by one task.
// Relies on the kernels of one instruction set (backward_table.h), which add in an order of their
// own.
#pragma once

#include <cstdint>

#include "cpu/backward_table.h"
#include "cpu/job.h"
#include "cpu/thread_pool.h"

namespace flashattn::cpu {

// dmask as a grid of regions: [batches][heads][row_regions][key_regions].
struct MaskGrid {
  std::int64_t batches = 1;
  std::int64_t heads = 1;
  std::int64_t row_regions = 1;
  std::int64_t key_regions = 1;
  std::int64_t rows = 0;  // of a region at most, whole blocks
  std::int64_t keys = 0;

  std::int64_t regions() const { return batches * heads * row_regions * key_regions; }
};

// Regions of kMaskRegionBlocks blocks along the axes that dmask has, of fewer where there would be
// too few regions for the threads. No bit of the result depends on it.
MaskGrid mask_grid(const AttentionJob& job, std::int64_t threads);

MaskRegion mask_region(const AttentionJob& job, const MaskGrid& grid, std::int64_t index);

// Writes job.dmask. Bitwise the same for any pool.
void run_mask_gradient(const AttentionJob& job, const BackwardKernels& kernels, ThreadPool& pool);

}  // namespace flashattn::cpu
