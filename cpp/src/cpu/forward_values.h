// O^T = O^T * rescale + V^T P^T for one key block. Rows of V that are not finite are zero in the
// packed V and are added here on their own, to the lanes that see them and to no other.
#pragma once

#include "cpu/forward_modified.h"
#include "cpu/forward_prefetch.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

template <class Unit, int first, int last>
FLASHATTN_INLINE void value_range(const Segment& segment, const float* V, std::int64_t v_ld,
                                  const float* P, Vec (&acc)[kTileRows][kPanelVecs]) {
  if constexpr (last <= kPanelVecs) {
    const int k = segment.begin / Unit::kElements;
    multiply_range<Unit, first, last>(segment.length / Unit::kElements, V + k * v_ld, 1, v_ld,
                                      P + k * kBlockQ, kBlockQ, acc);
  }
}

// The vectors that take part must be known at compile time for the accumulators to stay in
// registers.
template <class Unit>
FLASHATTN_INLINE void value_segment(const Segment& segment, const float* V, std::int64_t v_ld,
                                    const float* P, Vec (&acc)[kTileRows][kPanelVecs]) {
  switch (segment.first * 8 + segment.last) {
    case 0 * 8 + 1:
      return value_range<Unit, 0, 1>(segment, V, v_ld, P, acc);
    case 0 * 8 + 2:
      return value_range<Unit, 0, 2>(segment, V, v_ld, P, acc);
    case 0 * 8 + 3:
      return value_range<Unit, 0, 3>(segment, V, v_ld, P, acc);
    case 0 * 8 + 4:
      return value_range<Unit, 0, 4>(segment, V, v_ld, P, acc);
    case 1 * 8 + 2:
      return value_range<Unit, 1, 2>(segment, V, v_ld, P, acc);
    case 1 * 8 + 3:
      return value_range<Unit, 1, 3>(segment, V, v_ld, P, acc);
    case 1 * 8 + 4:
      return value_range<Unit, 1, 4>(segment, V, v_ld, P, acc);
    case 2 * 8 + 3:
      return value_range<Unit, 2, 3>(segment, V, v_ld, P, acc);
    case 2 * 8 + 4:
      return value_range<Unit, 2, 4>(segment, V, v_ld, P, acc);
    default:
      return value_range<Unit, 3, 4>(segment, V, v_ld, P, acc);
  }
}

// acc += O * rescale. The sum of a step is rounded on its own before it meets the sum of all
// earlier ones, so the error grows with the number of steps and not with the number of keys.
FLASHATTN_INLINE void add_earlier_steps(const float* O, const float* rescale, bool rose,
                                        Vec (&acc)[kTileRows][kPanelVecs]) {
  FLASHATTN_UNROLL for (int n = 0; n < kPanelVecs; ++n) {
    const Vec factor = rose ? load(rescale + n * kLanes) : broadcast(1.0F);
    FLASHATTN_UNROLL for (int m = 0; m < kTileRows; ++m) {
      acc[m][n] += load(O + m * kBlockQ + n * kLanes) * factor;
    }
  }
}

// Output dimensions between two calls of the prefetcher.
constexpr std::int64_t kPrefetchDims = 4 * kTileRows;

// Calls of the prefetcher per key block.
template <class Unit>
FLASHATTN_INLINE std::int64_t prefetch_slots(const PackedHead<Unit>& head) {
  return (head.v_ld + kPrefetchDims - 1) / kPrefetchDims * (kBlockVecs / kPanelVecs);
}

// first_step: O holds nothing yet. rose: some lane's maximum did, see softmax_block.
template <class Unit>
FLASHATTN_INLINE void value_block(const PackedHead<Unit>& head, const BlockScratch<Unit>& scratch,
                                  const KeyBlock& block, bool first_step, bool rose,
                                  Prefetcher& prefetcher) {
  const float* const V = head.V + block.first_key / Unit::kElements * head.v_ld;
  for (int panel = 0; panel < kBlockVecs; panel += kPanelVecs) {
    const int lane = panel * kLanes;
    Segments segments;
    find_segments(block, panel, segments);
    for (std::int64_t d = 0; d < head.v_ld; d += kTileRows) {
      float* const O = scratch.O + d * kBlockQ + lane;
      Vec acc[kTileRows][kPanelVecs];
      zero_tile(acc);
      if (d % kPrefetchDims == 0) prefetcher.advance();
      for (int i = 0; i < segments.count; ++i) {
        value_segment<Unit>(segments.list[i], V + d, head.v_ld, scratch.P + lane, acc);
      }
      if (!first_step) add_earlier_steps(O, scratch.rescale + lane, rose, acc);
      store_tile(O, kBlockQ, acc);
    }
  }
}

// P of one key for the lanes of vector n as float32.
template <class Unit>
FLASHATTN_INLINE Vec weight_of_key(const BlockScratch<Unit>& scratch, int k, int n) {
  if constexpr (Unit::kElements == 2) {
    return Unit::half(load(scratch.P + k / 2 * kBlockQ + n * kLanes), k % 2);
  } else {
    return load(scratch.P + k * kBlockQ + n * kLanes);
  }
}

// The lanes of vector n from which the mask hides a key; a slow path's.
FLASHATTN_INLINE VecI hidden_lanes(const ForwardModifiers& modifiers, std::int64_t key, int n) {
  VecI hidden{};
  for (int i = 0; i < kLanes; ++i) {
    hidden[i] = modifiers.mask.at(n * kLanes + i, key) == -kInfinity ? -1 : 0;
  }
  return hidden;
}

// modifiers: null for the plain kernel.
template <class Unit>
static __attribute__((noinline)) void add_nonfinite_value(
    const Rows& values, std::int64_t value_dim, const BlockScratch<Unit>& scratch,
    const VisibleLanes& lanes, const KeyBlock& block, const ForwardModifiers* modifiers, int k) {
  const std::int64_t key = block.first_key + k;
  float* const row = scratch.staging;
  read_row(values, key, value_dim, row);
  const VecI at = broadcast(static_cast<std::int32_t>(key));
  for (int n = 0; n < kBlockVecs; ++n) {
    if (k < block.begin[n] || k >= block.end[n]) continue;
    const VecI begin = load_int32(lanes.begin + n * kLanes);
    const VecI end = load_int32(lanes.end + n * kLanes);
    VecI sees = (at >= begin) & (at < end);
    if (modifiers != nullptr && modifiers->masked) sees &= ~hidden_lanes(*modifiers, key, n);
    const Vec p = weight_of_key(scratch, k, n);
    for (std::int64_t d = 0; d < value_dim; ++d) {
      float* const O = scratch.O + d * kBlockQ + n * kLanes;
      store(O, load(O) + select(sees, p * broadcast(row[d]), Vec{}));
    }
  }
}

// The rows of V in this block that value_block has counted as zero.
template <class Unit>
FLASHATTN_INLINE void add_nonfinite_values(const PackedHead<Unit>& head, const Rows& values,
                                           std::int64_t value_dim,
                                           const BlockScratch<Unit>& scratch,
                                           const VisibleLanes& lanes, const KeyBlock& block,
                                           const ForwardModifiers* modifiers) {
  const std::uint8_t* const skip = head.skip + block.first_key;
  for (int k = 0; k < block.length; k += kTileRows) {
    std::uint32_t four;
    __builtin_memcpy(&four, skip + k, sizeof(four));
    if (four == 0) continue;
    for (int i = k; i < k + kTileRows; ++i) {
      if (skip[i] != 0) add_nonfinite_value(values, value_dim, scratch, lanes, block, modifiers, i);
    }
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
