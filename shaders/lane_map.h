// Where the two elements stand that a lane holds of an 8x8 matrix. Metal does not say; kernels that
// work on scores in registers have to know. So the map is read off a matrix whose elements are
// their own numbers, once per kernel, and holds for the rest of it.
#pragma once

#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "abi.h"

using namespace metal;

// Element 0 of thread_elements() is (row0, column0) of the matrix, element 1 is (row1, column1).
struct LaneMap {
  uint row0;
  uint column0;
  uint row1;
  uint column1;
};

inline bool same_map(LaneMap a, LaneMap b) {
  return a.row0 == b.row0 && a.column0 == b.column0 && a.row1 == b.row1 && a.column1 == b.column1;
}

// The map that Apple's GPUs have been seen with (published by MLX and metal-flash-attention): both
// elements side by side in one row, whose four lanes differ in bits 0 and 3 of their number.
inline LaneMap apple_lane_map(uint lane) {
  LaneMap map;
  map.row0 = ((lane & 16u) >> 2) | ((lane >> 1) & 3u);
  map.column0 = ((lane & 8u) >> 1) | ((lane & 1u) << 1);
  map.row1 = map.row0;
  map.column1 = map.column0 + 1u;
  return map;
}

// numbers: 64 elements 0, 1, ..., 63 of a row-major 8x8 tile.
template <typename F>
LaneMap read_lane_map(threadgroup const F* numbers) {
  simdgroup_matrix<F, 8, 8> matrix;
  simdgroup_load(matrix, numbers, kFragment);
  const uint first = uint(float(matrix.thread_elements()[0]));
  const uint second = uint(float(matrix.thread_elements()[1]));
  LaneMap map;
  map.row0 = first / kFragment;
  map.column0 = first % kFragment;
  map.row1 = second / kFragment;
  map.column1 = second % kFragment;
  return map;
}

// Reads the map of F's matrices. Returns whether the kernel may go on: elements pass between
// matrices of F and of float, so both types need one map, and the Apple exchange needs Apple's. The
// answer is the same in every lane. `numbers` and `float_numbers` are scratch of 64 elements, free
// again after the next threadgroup barrier; every thread of the threadgroup has to take part.
template <uint exchange, uint threads, typename F>
bool learn_lane_map(thread LaneMap& map, threadgroup F* numbers, threadgroup float* float_numbers,
                    uint thread_index, uint lane) {
  for (uint e = thread_index; e < kFragmentSize; e += threads) {
    numbers[e] = F(float(e));
    if (sizeof(F) != sizeof(float)) float_numbers[e] = float(e);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  map = read_lane_map<F>(numbers);
  bool usable = true;
  if (sizeof(F) != sizeof(float)) usable = same_map(map, read_lane_map<float>(float_numbers));
  if (exchange == kExchangeApple) {
    const LaneMap apple = apple_lane_map(lane);
    usable = usable && same_map(map, apple);
    map = apple;  // the same numbers, but known to the compiler
  }
  return !simd_any(!usable);
}
