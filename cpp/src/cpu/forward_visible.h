// Which keys the lanes of one query block see, and what that means for the tiles of one key block:
// vectors of lanes that can be skipped, tiles that need a mask. All of it follows from Visibility's
// rising intervals.
#pragma once

#include "cpu/forward_layout.h"
#include "cpu/forward_table.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// Lane i of a block is row first_row + i of its task; see ForwardTask for what a row is.
struct QueryRows {
  std::int64_t first_row;
  std::int64_t count;
  std::int64_t heads;

  FLASHATTN_INLINE QueryRows(const AttentionJob& job, const ForwardTask& task) {
    const std::int64_t left = job.seqlen_q * task.heads - task.first_row;
    first_row = task.first_row;
    count = left < kBlockQ ? left : kBlockQ;
    heads = task.heads;
  }

  FLASHATTN_INLINE std::int64_t query(std::int64_t lane) const {
    return heads == 1 ? first_row + lane : (first_row + lane) / heads;
  }
  FLASHATTN_INLINE std::int64_t head(std::int64_t lane) const {
    return heads == 1 ? 0 : (first_row + lane) % heads;
  }
};

// What the modified kernel knows of the lanes; the plain one passes this type's absence.
using ForwardModifiers = LaneModifiers<kBlockQ>;

FLASHATTN_INLINE void set_forward_lanes(const AttentionJob& job, const ForwardTask& task,
                                        const QueryRows& rows, ForwardModifiers& modifiers) {
  const auto place_of = [&](int lane) __attribute__((always_inline)) {
    const std::int64_t row = lane < rows.count ? lane : rows.count - 1;
    return LanePlace{.head = task.head + rows.head(row), .row = rows.query(row)};
  };
  set_lanes(job, task.batch, place_of, modifiers);
}

// Keys are int32 here: seqlen_k is below 2^31.
struct VisibleLanes {
  // Keys that lane i sees: [begin[i], end[i]). Lanes past the last query repeat it.
  alignas(64) std::int32_t begin[kBlockQ];
  alignas(64) std::int32_t end[kBlockQ];
  // Per vector of lanes: keys that some lane sees, and keys that every lane sees.
  std::int64_t some_begin[kBlockVecs];
  std::int64_t some_end[kBlockVecs];
  std::int64_t every_begin[kBlockVecs];
  std::int64_t every_end[kBlockVecs];
  int vecs;       // vectors that hold a query
  Interval keys;  // that the block has to visit
};

FLASHATTN_INLINE void find_visible_lanes(const Visibility& visibility, const QueryRows& rows,
                                         VisibleLanes& lanes) {
  for (int i = 0; i < kBlockQ; ++i) {
    const Interval keys = visibility.keys_of_row(rows.query(i < rows.count ? i : rows.count - 1));
    lanes.begin[i] = static_cast<std::int32_t>(keys.begin);
    lanes.end[i] = static_cast<std::int32_t>(keys.end);
  }
  lanes.vecs = static_cast<int>((rows.count + kLanes - 1) / kLanes);
  for (int n = 0; n < lanes.vecs; ++n) {
    const int first = n * kLanes;
    const int last = first + kLanes - 1;
    lanes.some_begin[n] = lanes.begin[first];
    lanes.some_end[n] = lanes.end[last];
    lanes.every_begin[n] = lanes.begin[last];
    lanes.every_end[n] = lanes.end[first];
  }
  lanes.keys = visibility.keys_of_rows(rows.query(0), rows.query(rows.count - 1) + 1);
}

// Keys [0, length) of one step, counted from its first key, length a multiple of kTileRows. Vector
// n takes part in [begin[n], end[n]), whole tiles; both ends rise with n, so the vectors of any
// tile are neighbours.
struct KeyBlock {
  std::int64_t first_key;
  int length;
  int begin[kBlockVecs];
  int end[kBlockVecs];
};

FLASHATTN_INLINE int clamp_to_block(std::int64_t key, int length) {
  return static_cast<int>(key < 0 ? 0 : key > length ? length : key);
}

FLASHATTN_INLINE void find_key_block(const VisibleLanes& lanes, std::int64_t first_key, int length,
                                     KeyBlock& block) {
  block.first_key = first_key;
  block.length = length;
  for (int n = 0; n < kBlockVecs; ++n) {
    if (n >= lanes.vecs) {
      block.begin[n] = block.end[n] = length;
      continue;
    }
    const int begin = clamp_to_block(lanes.some_begin[n] - first_key, length);
    const int end = clamp_to_block(lanes.some_end[n] - first_key + kTileRows - 1, length);
    block.begin[n] = begin / kTileRows * kTileRows;
    block.end[n] = end / kTileRows * kTileRows;
    if (block.end[n] < block.begin[n]) block.end[n] = block.begin[n];
  }
}

// Vectors [first, last) of the panel that starts at vector `panel` and take part in key `k` of the
// block.
struct VecRange {
  int first;
  int last;
};

FLASHATTN_INLINE VecRange vecs_at(const KeyBlock& block, int panel, int k) {
  VecRange range = {panel, panel + kPanelVecs};
  while (range.first < range.last && k >= block.end[range.first]) ++range.first;
  while (range.first < range.last && k < block.begin[range.last - 1]) --range.last;
  return range;
}

// Runs of keys over which the vectors of a panel that take part stay the same.
struct Segment {
  int begin;
  int length;
  int first;  // vectors, counted from the panel
  int last;
};

struct Segments {
  Segment list[2 * kPanelVecs + 1];
  int count;
};

FLASHATTN_INLINE void find_segments(const KeyBlock& block, int panel, Segments& segments) {
  segments.count = 0;
  for (int k = 0; k < block.length;) {
    int next = block.length;
    for (int n = panel; n < panel + kPanelVecs; ++n) {
      if (block.begin[n] > k && block.begin[n] < next) next = block.begin[n];
      if (block.end[n] > k && block.end[n] < next) next = block.end[n];
    }
    const VecRange range = vecs_at(block, panel, k);
    if (range.first < range.last) {
      segments.list[segments.count++] = {
          .begin = k, .length = next - k, .first = range.first - panel, .last = range.last - panel};
    }
    k = next;
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
