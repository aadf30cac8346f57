// The one matrix-product kernel: a register tile acc[rows][vecs] += A B, with A read as broadcasts
// and B as vectors, so that neither operand is ever transposed and no sum is horizontal.
//
// A "unit" is what one 32-bit lane holds along the contraction: one float32, or a pair of bf16 that
// one instruction multiplies and adds. The kernel is the same for both; only the multiply-add
// differs.
#pragma once

#include "cpu/vec.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

struct Float32Unit {
  static constexpr int kElements = 1;  // values along the contraction in one unit
  static constexpr int kExpDegree = 6;
  static FLASHATTN_INLINE Vec multiply_add(Vec acc, Vec a, Vec b) { return a * b + acc; }
};

#if defined(FLASHATTN_HAS_BF16_DOT)
struct Bf16PairUnit {
  static constexpr int kElements = 2;
  static constexpr int kExpDegree = 3;
  static FLASHATTN_INLINE Vec multiply_add(Vec acc, Vec a, Vec b) {
    return dot_bf16_pairs(acc, a, b);
  }
  // Rounds two vectors of float32 to one of pairs.
  static FLASHATTN_INLINE Vec pair(Vec low, Vec high) { return interleave_bf16(low, high); }
  // One half of every pair as float32.
  static FLASHATTN_INLINE Vec half(Vec pairs, int which) {
    const VecU bits = reinterpret_cast<VecU>(pairs);
    return reinterpret_cast<Vec>(which == 0 ? bits << 16 : bits & 0xffff0000U);
  }
};
#endif

// Rows of a register tile. Every key count, query count and output dimension that a tile runs over
// is padded to a multiple of it.
constexpr int kTileRows = 4;

FLASHATTN_INLINE std::int64_t round_up(std::int64_t x, std::int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

template <int rows, int vecs>
FLASHATTN_INLINE void zero_tile(Vec (&acc)[rows][vecs]) {
  FLASHATTN_UNROLL for (int m = 0; m < rows; ++m) {
    FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) acc[m][n] = Vec{};
  }
}

// acc += part.
template <int rows, int vecs>
FLASHATTN_INLINE void add_tile(const Vec (&part)[rows][vecs], Vec (&acc)[rows][vecs]) {
  FLASHATTN_UNROLL for (int m = 0; m < rows; ++m) {
    FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) acc[m][n] += part[m][n];
  }
}

template <int rows, int vecs>
FLASHATTN_INLINE void load_tile(const float* from, std::ptrdiff_t stride, Vec (&acc)[rows][vecs]) {
  FLASHATTN_UNROLL for (int m = 0; m < rows; ++m) {
    FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) acc[m][n] =
        load(from + m * stride + n * kLanes);
  }
}

template <int rows, int vecs>
FLASHATTN_INLINE void store_tile(float* to, std::ptrdiff_t stride, const Vec (&acc)[rows][vecs]) {
  FLASHATTN_UNROLL for (int m = 0; m < rows; ++m) {
    FLASHATTN_UNROLL for (int n = 0; n < vecs; ++n) store(to + m * stride + n * kLanes, acc[m][n]);
  }
}

// acc[m][n] += sum over k < depth of A[m * a_row + k * a_depth] * B[k * b_depth + n * kLanes ...],
// for the vectors n of [first, last) only. Strides and depth in units.
template <class Unit, int first, int last, int rows, int vecs>
FLASHATTN_INLINE void multiply_range(std::int64_t depth, const float* A, std::ptrdiff_t a_row,
                                     std::ptrdiff_t a_depth, const float* B, std::ptrdiff_t b_depth,
                                     Vec (&acc)[rows][vecs]) {
  for (std::int64_t k = 0; k < depth; ++k, A += a_depth, B += b_depth) {
    Vec b[vecs];
    FLASHATTN_UNROLL for (int n = first; n < last; ++n) b[n] = load(B + n * kLanes);
    FLASHATTN_UNROLL for (int m = 0; m < rows; ++m) {
      const Vec a = broadcast(A[m * a_row]);
      FLASHATTN_UNROLL for (int n = first; n < last; ++n) acc[m][n] =
          Unit::multiply_add(acc[m][n], a, b[n]);
    }
  }
}

template <class Unit, int rows, int vecs>
FLASHATTN_INLINE void multiply(std::int64_t depth, const float* A, std::ptrdiff_t a_row,
                               std::ptrdiff_t a_depth, const float* B, std::ptrdiff_t b_depth,
                               Vec (&acc)[rows][vecs]) {
  multiply_range<Unit, 0, vecs>(depth, A, a_row, a_depth, B, b_depth, acc);
}

// Units that dot_tile sums in one go: a long dot product is a sum of sums, whose error grows more
// slowly. Forward and backward take the same steps, so that backward meets the scores of lse.
constexpr std::int64_t kDepthStep = 64;

// acc[m][n] = sum of A[m * a_row + k] B[k * b_depth + n * kLanes ..] over the units k of depth.
template <class Unit, int rows, int vecs>
FLASHATTN_INLINE void dot_tile(std::int64_t depth, const float* A, std::ptrdiff_t a_row,
                               const float* B, std::ptrdiff_t b_depth, Vec (&acc)[rows][vecs]) {
  zero_tile(acc);
  multiply<Unit>(depth < kDepthStep ? depth : kDepthStep, A, a_row, 1, B, b_depth, acc);
  for (std::int64_t k = kDepthStep; k < depth; k += kDepthStep) {
    const std::int64_t left = depth - k;
    Vec part[rows][vecs];
    zero_tile(part);
    multiply<Unit>(left < kDepthStep ? left : kDepthStep, A + k, a_row, 1, B + k * b_depth, b_depth,
                   part);
    add_tile(part, acc);
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
