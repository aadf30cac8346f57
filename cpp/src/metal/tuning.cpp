// Tile shapes; see tuning.h.
#include "metal/tuning.h"

#include <algorithm>
#include <cassert>

#include "metal/fixed_vector.h"
#include "metal/kernel_key.h"

namespace flashattn::metal {

namespace {

struct Block {
  int rows;
  int columns;
};

// Every kernel of the pass that has tiles, with and without options: these change no size.
FixedVector<KernelKey, 4> tiled_kernels(const Geometry& geometry, Pass pass) {
  FixedVector<KernelKind, 4> kinds = {KernelKind::kForward};
  if (pass == Pass::kBackward) {
    kinds = {KernelKind::kBackwardDq, KernelKind::kBackwardDv, KernelKind::kBackwardDk,
             KernelKind::kMaskGradient};
  }
  FixedVector<KernelKey, 4> keys;
  for (const KernelKind kind : kinds) {
    keys.push_back({.kind = kind,
                    .head_tile = geometry.head_tile,
                    .value_tile = geometry.value_tile,
                    .block_rows = geometry.block_rows,
                    .block_columns = geometry.block_columns});
  }
  return keys;
}

}  // namespace

int round_up_to_tile(std::int64_t dim) {
  assert(dim >= 1 && dim <= kMaxTile);
  for (const int tile : {16, 32, 48, 64, 80, 96, 128, 160, 192}) {
    if (dim <= tile) return tile;
  }
  return kMaxTile;
}

std::string misfit(const Geometry& geometry, Pass pass, const DeviceFacts& facts) {
  const auto needs = [&](std::int64_t amount, const char* what, std::int64_t has) {
    return "the kernels need " + std::to_string(amount) + " " + what + ", " + facts.name + " has " +
           std::to_string(has);
  };
  int threads = std::max(kDeltaRows, kSumHeads) * static_cast<int>(abi::kSimdWidth);
  std::int64_t memory = 0;
  for (const KernelKey& key : tiled_kernels(geometry, pass)) {
    threads = std::max(threads, threads_per_threadgroup(key));
    memory = std::max(memory, threadgroup_memory(key));
  }
  if (memory > facts.max_threadgroup_memory) {
    return needs(memory, "bytes of threadgroup memory", facts.max_threadgroup_memory);
  }
  if (threads > facts.max_threads_per_threadgroup) {
    return needs(threads, "threads per threadgroup", facts.max_threads_per_threadgroup);
  }
  return {};
}

Geometry choose_geometry(const AttentionProblem& problem, const DeviceFacts& facts) {
  Geometry geometry{.head_tile = round_up_to_tile(problem.head_dim),
                    .value_tile = round_up_to_tile(problem.value_dim)};
  // 32 x 16 is the seed kernels' shape: four simdgroups, 12.7 KB of threadgroup memory at 64. Above
  // 128 it would pass the 32 KB limit. The smaller shapes are guesses.
  const bool wide = std::max(geometry.head_tile, geometry.value_tile) > 128;
  for (const Block block : {Block{32, 16}, Block{16, 8}, Block{8, 8}}) {
    if (wide && block.rows == 32) continue;
    geometry.block_rows = block.rows;
    geometry.block_columns = block.columns;
    if (misfit(geometry, problem.pass, facts).empty()) break;
  }
  return geometry;
}

}  // namespace flashattn::metal
