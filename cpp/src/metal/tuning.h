// Tuning: which tile shapes a problem runs with. Rows cite a measurement or say "guess".
#pragma once

#include <string>

#include "flashattn/problem.h"
#include "metal/device_facts.h"

namespace flashattn::metal {

// Largest head_dim and value_dim the kernels hold in registers.
inline constexpr int kMaxTile = 256;

// Rows and keys of one tile of a mask's class table: a multiple of every block below, so that a
// block lies in one tile.
inline constexpr int kMaskTile = 32;

// Rows of one delta threadgroup, and heads of one that sums over rows: each takes a simdgroup. A
// guess.
inline constexpr int kDeltaRows = 8;
inline constexpr int kSumHeads = 8;

// Sequences are shorter: row intervals are sums in 32 bits.
inline constexpr std::int64_t kMaxLength = std::int64_t{1} << 30;

struct Geometry {
  int head_tile = 0;
  int value_tile = 0;
  int block_rows = 0;
  int block_columns = 0;
};

// Smallest tile size that holds `dim` (1..kMaxTile). Few sizes, so that few pipelines are compiled.
int round_up_to_tile(std::int64_t dim);

// The largest blocks that the device has threadgroup memory and threads for, or the smallest ones
// where it has not: misfit tells.
Geometry choose_geometry(const AttentionProblem& problem, const DeviceFacts& facts);

// Why kernels of this pass cannot run with this geometry on the device; empty when they can.
std::string misfit(const Geometry& geometry, Pass pass, const DeviceFacts& facts);

}  // namespace flashattn::metal
