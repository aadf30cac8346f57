// See mask_classes.h.
#include "cpu/mask_classes.h"

#include <algorithm>

namespace flashattn::cpu {
namespace {

// Elements that take about as long to read as a helper takes to wake up.
constexpr std::int64_t kMinElements = 50'000;

MaskTiles shape_of(const AttentionJob& job, std::int64_t tile_rows) {
  if (!is_dense(job.mask)) return {};
  return mask_tiles_of(job.mask, {.batch = job.batch,
                                  .query_heads = job.query_heads,
                                  .seqlen_q = job.seqlen_q,
                                  .seqlen_k = job.seqlen_k,
                                  .tile_rows = tile_rows,
                                  .tile_keys = kMaskTileKeys});
}

// Keys that some row of the strip sees in some batch entry that reads this plane.
Interval keys_of_strip(const AttentionJob& job, const MaskTiles& tiles, std::int64_t strip) {
  const std::int64_t row = strip % tiles.row_tiles() * tiles.tile_rows;
  const std::int64_t end = std::min(row + tiles.tile_rows, job.seqlen_q);
  const std::int64_t plane = strip / tiles.row_tiles();
  const bool shared = tiles.batch_step == 0;
  const std::int64_t first_batch = shared ? 0 : plane / tiles.batch_step;
  const std::int64_t last_batch = shared ? job.batch : first_batch + 1;
  Interval keys{job.seqlen_k, 0};
  for (std::int64_t b = first_batch; b < last_batch; ++b) {
    const Interval seen = job.visibility[b].keys_of_rows(row, end);
    if (seen.begin >= seen.end) continue;
    const std::int64_t column = first_mask_key(job, b);
    keys = {std::min(keys.begin, column + seen.begin), std::max(keys.end, column + seen.end)};
  }
  return keys;
}

}  // namespace

MaskClasses::MaskClasses(const AttentionJob& job, std::int64_t tile_rows, ThreadPool& pool)
    : tiles_(shape_of(job, tile_rows)) {
  if (tiles_.planes == 0 || tiles_.bytes() == 0) return;
  memory_.emplace(static_cast<std::size_t>(tiles_.bytes()));
  tiles_.data = reinterpret_cast<TileVisibility*>(memory_->data());
  const std::int64_t strips = tiles_.strips();
  const std::int64_t per_body = 1 + kMinElements / (tile_rows * job.seqlen_k);
  pool.parallel_for((strips + per_body - 1) / per_body, [&](std::int64_t body) {
    const std::int64_t end = std::min(strips, (body + 1) * per_body);
    for (std::int64_t strip = body * per_body; strip < end; ++strip) {
      classify_mask_tiles(job.mask, tiles_, strip, keys_of_strip(job, tiles_, strip));
    }
  });
}

}  // namespace flashattn::cpu
