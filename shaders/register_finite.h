// Tiles with values that are not finite, where some row may not see them: a weight of 0 times such
// a value would poison that row. Register kernels look for them in tiles that some row sees in
// part, and in two ways, to the same bits. Without kConstantSelects, as calls begin, they only say
// so in the status word and the results are void. With it the product takes 0 in place of such
// values and the rows that see them add them on their own; that needs more registers than it is
// worth keeping.
#pragma once

#include <metal_atomic>

#include "register_tile.h"

constant bool selects [[function_constant(kConstantSelects)]];

inline void raise_status(device atomic_uint* status, uint code) {
  atomic_store_explicit(status, code, memory_order_relaxed);
}

// Whether this thread's share of a tile holds a value that is not finite. The tile is staged and
// visible.
template <uint rows, uint columns, uint stride, uint threads, typename F>
bool share_is_non_finite(threadgroup const F* tile, uint thread_index) {
  bool bad = false;
  for (uint e = thread_index; e < rows * columns; e += threads) {
    bad = bad || !is_finite_bits(float(tile[e / columns * stride + e % columns]));
  }
  return bad;
}

// Whether any thread of the threadgroup says so; the same answer in every thread. Takes one
// threadgroup barrier. flags: one word per simdgroup, which nobody has read since another barrier.
template <uint threads>
bool any_thread(bool says_so, threadgroup uint* flags, uint lane, uint simdgroup) {
  const bool own = simd_any(says_so);
  if (lane == 0) flags[simdgroup] = own ? 1u : 0u;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint found = 0;
  for (uint s = 0; s < threads / kSimdWidth; ++s) found |= flags[s];
  return found != 0u;
}

// What comes of a share that is not finite: whether the threadgroup has to select, or a status.
template <uint threads>
bool must_select(bool share_is_bad, device atomic_uint* status, threadgroup uint* flags, uint lane,
                 uint simdgroup) {
  if (selects) return any_thread<threads>(share_is_bad, flags, lane, simdgroup);
  if (share_is_bad) raise_status(status, kStatusNonFinite);
  return false;
}

// Replaces what is not finite by 0. A threadgroup barrier before and after.
template <uint rows, uint columns, uint stride, uint threads, typename F>
void drop_non_finite(threadgroup F* tile, uint thread_index) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint e = thread_index; e < rows * columns; e += threads) {
    threadgroup F* at = tile + (e / columns * stride + e % columns);
    *at = finite_part(*at);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Adds to a strip the non-finite values of the tile that its rows see: bit j of seen0 and seen1
// tells whether the rows of the lane's two elements see row j of the tile. as_nan: whatever is seen
// counts as NaN. The loop over rows stays one and needs next to nothing in registers: a path that
// is hardly ever taken must not cost the kernel any.
template <uint rows, uint stride, bool as_nan, typename F, uint columns>
void add_non_finite(thread simdgroup_float8x8 (&strip)[columns], uint seen0, uint seen1,
                    threadgroup const F* tile, LaneMap map) {
#pragma clang loop unroll(disable)
  for (uint j = 0; j < rows; ++j) {
    const bool sees0 = (seen0 >> j & 1u) != 0u;
    const bool sees1 = (seen1 >> j & 1u) != 0u;
#pragma clang loop unroll(full)
    for (uint d = 0; d < columns; ++d) {
      const float x0 = float(tile[j * stride + map.column0 + d * kFragment]);
      const float x1 = float(tile[j * stride + map.column1 + d * kFragment]);
      if (sees0 && !is_finite_bits(x0)) strip[d].thread_elements()[0] += as_nan ? NAN : x0;
      if (sees1 && !is_finite_bits(x1)) strip[d].thread_elements()[1] += as_nan ? NAN : x1;
    }
  }
}
