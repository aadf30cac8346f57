// Tile shapes; see tuning.h.
#include "metal/tuning.h"

#include <algorithm>
#include <cassert>

namespace flashattn::metal {

int round_up_to_tile(std::int64_t dim) {
  assert(dim >= 1 && dim <= kMaxTile);
  for (const int tile : {16, 32, 48, 64, 80, 96, 128, 160, 192}) {
    if (dim <= tile) return tile;
  }
  return kMaxTile;
}

Geometry choose_geometry(const AttentionProblem& problem, const DeviceFacts&) {
  Geometry geometry{.head_tile = round_up_to_tile(problem.head_dim),
                    .value_tile = round_up_to_tile(problem.value_dim)};
  // 32 x 16 is the seed kernels' shape: four simdgroups, 12.7 KB of threadgroup memory at 64. Above
  // 128 it would pass the 32 KB limit. The smaller shape is a guess.
  const bool wide = std::max(geometry.head_tile, geometry.value_tile) > 128;
  geometry.block_rows = wide ? 16 : 32;
  geometry.block_columns = wide ? 8 : 16;
  return geometry;
}

}  // namespace flashattn::metal
