// Tuning: which tile shapes a problem runs with. Rows cite a measurement or say "guess".
#pragma once

#include <optional>
#include <string>

#include "flashattn/problem.h"
#include "metal/device_facts.h"
#include "metal/kernel_key.h"

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

// By how many powers of two a row's running maximum may lag behind in the forward register kernels:
// new maxima are then rare, and weights stay below 2^8. From the cost model
// (tests/metal/cost_model).
inline constexpr float kMaxSlack = 8.0F;

// A register kernel for one product of the pass, or nothing where the staged one has to do: the
// lane map is not known, the tuning table says so, or the device is too small. `key` has kind,
// dtype, tiles and options; what comes back has a block and a variant too, with all rows full. The
// block's columns, and so the bits of the result, depend on dtype and tiles alone.
std::optional<KernelKey> choose_register(KernelKey key, std::int64_t rows,
                                         const DeviceFacts& facts);

// The same for few rows, whose keys are split into chunks: simdgroups take the heads that share
// keys.
std::optional<KernelKey> choose_split(KernelKey key, std::int64_t heads_per_kv,
                                      const DeviceFacts& facts);

// Rows that are few, and keys of a chunk: a multiple of every block. Both are guesses; the number
// of chunks depends on the problem alone.
inline constexpr int kFewRows = static_cast<int>(abi::kFragment);
inline constexpr int kChunkKeys = 256;

// Whether dK and dV come from one kernel.
bool fuses_dkv(int head_tile, int value_tile);

// Why kernels of this pass cannot run with this geometry on the device; empty when they can.
std::string misfit(const Geometry& geometry, Pass pass, const DeviceFacts& facts);

}  // namespace flashattn::metal
