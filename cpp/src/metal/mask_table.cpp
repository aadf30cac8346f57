// Classifying a mask's tiles; see mask_table.h.
#include "metal/mask_table.h"

#include <utility>

#include "metal/schedule_options.h"

namespace flashattn::metal {

std::vector<TileVisibility> mask_table(const AttentionProblem& problem, const TensorView& mask,
                                       std::vector<TileVisibility> reused) {
  static_assert(static_cast<int>(TileVisibility::kNone) == abi::kMaskTileNone);
  static_assert(static_cast<int>(TileVisibility::kMixed) == abi::kMaskTileMixed);
  static_assert(static_cast<int>(TileVisibility::kAll) == abi::kMaskTileAll);
  const ScoreMask scores = score_mask_of(mask);
  MaskTiles tiles = mask_tiles_of(problem, mask);
  std::vector<TileVisibility> table = std::move(reused);
  table.assign(static_cast<std::size_t>(tiles.bytes()), TileVisibility::kMixed);
  // Behind left padding an entry's tiles of keys lie across the mask's.
  if (scores.data == nullptr || problem.kv_starts) return table;
  tiles.data = table.data();
  for (std::int64_t strip = 0; strip < tiles.strips(); ++strip) {
    classify_mask_tiles(scores, tiles, strip, {0, tiles.seqlen_k});
  }
  return table;
}

}  // namespace flashattn::metal
