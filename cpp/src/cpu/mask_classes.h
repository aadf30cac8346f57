// The classes of a dense mask's tiles (core/mask_tiles.h) for one pass over one call: a read of the
// part of the mask that some row may see, by all threads of the pool. Masks without a row or a key
// axis need none.
#pragma once

#include <optional>

#include "cpu/job.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

namespace flashattn::cpu {

class MaskClasses {
 public:
  // tile_rows: query rows of a block of the pass.
  MaskClasses(const AttentionJob& job, std::int64_t tile_rows, ThreadPool& pool);

  // Valid as long as this object; without data for a mask that is not dense.
  const MaskTiles& tiles() const { return tiles_; }

 private:
  MaskTiles tiles_;
  std::optional<Workspace> memory_;
};

}  // namespace flashattn::cpu
