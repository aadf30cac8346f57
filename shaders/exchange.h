// Maximum and sum over a row of scores whose elements are spread over the lanes of a simdgroup.
//   kExchangeAny    through a table of 64 floats: right under every lane map
//   kExchangeApple  by two shuffles: right under Apple's map alone, which learn_lane_map has
//   checked
// Both add in one order, so that they give the same bits.
#pragma once

#include <metal_stdlib>

#include "lane_map.h"

// The two operations, as tags.
struct MaxOf {};
struct SumOf {};

inline float combine(MaxOf, float a, float b) { return max(a, b); }
inline float combine(SumOf, float a, float b) { return a + b; }

// On return both elements hold the result over their own row. table: 64 floats of this simdgroup,
// which nobody else uses meanwhile.
template <uint exchange, typename Operation>
void combine_rows(thread float& element0, thread float& element1, LaneMap map,
                  threadgroup float* table, uint lane, Operation operation) {
  if (exchange == kExchangeApple) {
    float x = combine(operation, element0, element1);
    x = combine(operation, x, simd_shuffle_xor(x, 1));
    x = combine(operation, x, simd_shuffle_xor(x, 8));
    element0 = x;
    element1 = x;
    return;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  table[map.row0 * kFragment + map.column0] = element0;
  table[map.row1 * kFragment + map.column1] = element1;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  // Lane r reduces row r by columns, pairs first, as the shuffles do.
  if (lane < kFragment) {
    threadgroup const float* row = table + lane * kFragment;
    const float left =
        combine(operation, combine(operation, row[0], row[1]), combine(operation, row[2], row[3]));
    const float right =
        combine(operation, combine(operation, row[4], row[5]), combine(operation, row[6], row[7]));
    table[lane * kFragment] = combine(operation, left, right);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  element0 = table[map.row0 * kFragment];
  element1 = table[map.row1 * kFragment];
}
