// Tuning: which tile shapes a problem runs with. Rows cite a measurement or say "guess".
#pragma once

#include "flashattn/problem.h"
#include "metal/device_facts.h"

namespace flashattn::metal {

// Largest head_dim and value_dim the kernels hold in registers.
inline constexpr int kMaxTile = 256;

struct Geometry {
  int head_tile = 0;
  int value_tile = 0;
  int block_rows = 0;
  int block_columns = 0;
};

// Smallest tile size that holds `dim` (1..kMaxTile). Few sizes, so that few pipelines are compiled.
int round_up_to_tile(std::int64_t dim);

Geometry choose_geometry(const AttentionProblem& problem, const DeviceFacts& facts);

}  // namespace flashattn::metal
