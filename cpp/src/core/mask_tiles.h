// Masks as kernels read them, and which tiles of one need no look at its elements: an element is
// open (True, or a float above -inf) or closed (False, -inf), and a tile whose every element is
// closed can be skipped while one that changes no score is computed as if there were no mask.
// Classifying reads the mask once. It relies on visibility.h for the names of the three classes;
// kernels include this file, so nothing here uses the standard library.
#pragma once

#include <cstdint>

#include "core/visibility.h"
#include "flashattn/tensor.h"

namespace flashattn {

// A mask over (batch, query head, query row, key): strides in elements, 0 along the axes on which
// it is broadcast, whether by its shape or by its strides.
struct ScoreMask {
  const void* data = nullptr;  // null: the call has none
  DType dtype = DType::kBool;  // bool or floating
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t key_stride = 0;

  // Address of key 0 of one row.
  FLASHATTN_INLINE const char* row(std::int64_t batch, std::int64_t head, std::int64_t i) const {
    const std::int64_t at = batch * batch_stride + head * head_stride + i * row_stride;
    return static_cast<const char*>(data) + at * static_cast<std::int64_t>(item_size(dtype));
  }
};

// The mask of a view that broadcasts to (batch, query heads, seqlen_q, seqlen_k); none for rank 0.
ScoreMask score_mask_of(const TensorView& view);

// The classes of a mask's tiles, [plane][row tile][key tile]; a plane is a (batch, head) pair whose
// rows are not those of another.
struct MaskTiles {
  TileVisibility* data = nullptr;  // null: not classified, every tile counts as mixed
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;
  std::int64_t tile_rows = 0;
  std::int64_t tile_keys = 0;
  std::int64_t planes = 0;
  std::int64_t batch_step = 0;  // planes from one batch entry to the next, 0 if they share
  std::int64_t head_step = 0;   // likewise for heads

  FLASHATTN_INLINE std::int64_t row_tiles() const { return (seqlen_q + tile_rows - 1) / tile_rows; }
  FLASHATTN_INLINE std::int64_t key_tiles() const { return (seqlen_k + tile_keys - 1) / tile_keys; }
  // Rows of tiles in all planes: the unit of classify_mask_tiles.
  FLASHATTN_INLINE std::int64_t strips() const { return planes * row_tiles(); }
  FLASHATTN_INLINE std::int64_t bytes() const { return strips() * key_tiles(); }

  // What all tiles that hold some of rows [rows.begin, rows.end) and keys [keys.begin, keys.end)
  // have in common; ends past the last row or key do not count. Neither interval is empty.
  FLASHATTN_INLINE TileVisibility of(std::int64_t batch, std::int64_t head, Interval rows,
                                     Interval keys) const {
    if (data == nullptr) return TileVisibility::kMixed;
    const std::int64_t last_row = (rows.end < seqlen_q ? rows.end : seqlen_q) - 1;
    const std::int64_t last_key = (keys.end < seqlen_k ? keys.end : seqlen_k) - 1;
    const std::int64_t plane = batch * batch_step + head * head_step;
    const TileVisibility* const tiles = data + plane * row_tiles() * key_tiles();
    const TileVisibility first =
        tiles[rows.begin / tile_rows * key_tiles() + keys.begin / tile_keys];
    for (std::int64_t r = rows.begin / tile_rows; r <= last_row / tile_rows; ++r) {
      for (std::int64_t k = keys.begin / tile_keys; k <= last_key / tile_keys; ++k) {
        if (tiles[r * key_tiles() + k] != first) return TileVisibility::kMixed;
      }
    }
    return first;
  }
};

// What a call's tiles are measured by.
struct MaskTileSizes {
  std::int64_t batch = 0;
  std::int64_t query_heads = 0;
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;
  std::int64_t tile_rows = 0;
  std::int64_t tile_keys = 0;
};

// Whether classifying pays: elements vary with the row and with the key. A mask without one of the
// axes is as fast to read as its classes.
FLASHATTN_INLINE bool is_dense(const ScoreMask& mask) {
  return mask.data != nullptr && mask.row_stride != 0 && mask.key_stride != 0;
}

// The classes' shape, without memory: the caller allocates bytes() and sets data.
MaskTiles mask_tiles_of(const ScoreMask& mask, const MaskTileSizes& sizes);

// Fills row `strip` of tiles as far as they hold some of `keys`; the others are not read and count
// as mixed. Strips are independent, so that any number of threads may share them.
void classify_mask_tiles(const ScoreMask& mask, const MaskTiles& tiles, std::int64_t strip,
                         Interval keys);

}  // namespace flashattn
