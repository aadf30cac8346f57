// Tiles: the pieces every kernel is made of. A tile is a row-major block of float in threadgroup
// memory; a strip is the 8 rows of it that one simdgroup owns, held as 8x8 fragments. Nothing here
// assumes how a fragment's elements are spread over lanes: elementwise work on fragments only ever
// combines equal positions.
#pragma once

#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "abi.h"
#include "storage.h"
#include "visibility.h"

using namespace metal;

constexpr uint max3(uint a, uint b, uint c) { return a > b ? (a > c ? a : c) : (b > c ? b : c); }

// Which row of its strip a lane works on, and which of the row's four lanes it is.
struct LaneRow {
  uint row;      // 0..7
  uint quarter;  // 0..3: takes columns quarter, quarter + 4, ...
};

inline LaneRow lane_row(uint lane) {
  LaneRow at;
  at.row = lane / kLanesPerRow;
  at.quarter = lane % kLanesPerRow;
  return at;
}

// Copies `valid_rows` rows of `dim` elements into a tile of `rows` x `columns`, zero outside.
// `source` points at the first row's first element. Returns whether this thread met a value that is
// not finite.
template <uint rows, uint columns, uint threads, typename T>
bool stage_rows(threadgroup float* tile, uint tile_stride, device const T* source,
                TensorStrides strides, uint valid_rows, uint dim, uint thread_index) {
  bool non_finite = false;
  for (uint e = thread_index; e < rows * columns; e += threads) {
    const uint r = e / columns;
    const uint d = e % columns;
    float x = 0.0f;
    if (r < valid_rows && d < dim) {
      x = to_float(source[FLASHATTN_INT64(r) * strides.row + FLASHATTN_INT64(d) * strides.dim]);
    }
    tile[r * tile_stride + d] = x;
    non_finite = non_finite || !is_finite_bits(x);
  }
  return non_finite;
}

// Writes `valid_rows` rows of `dim` elements of a tile to `target`, or adds them to it.
template <uint rows, uint columns, uint threads, typename T>
void write_rows(device T* target, TensorStrides strides, threadgroup const float* tile,
                uint tile_stride, uint valid_rows, uint dim, bool accumulate, uint thread_index) {
  for (uint e = thread_index; e < rows * columns; e += threads) {
    const uint r = e / columns;
    const uint d = e % columns;
    if (r >= valid_rows || d >= dim) continue;
    device T* at = target + FLASHATTN_INT64(r) * strides.row + FLASHATTN_INT64(d) * strides.dim;
    float x = tile[r * tile_stride + d];
    if (accumulate) x += to_float(*at);
    store_float(at, x);
  }
}

// First element of row `row` of one head.
template <typename T>
device T* row_pointer(device T* base, TensorStrides strides, uint b, uint head, uint row) {
  return base + FLASHATTN_INT64(b) * strides.batch + FLASHATTN_INT64(head) * strides.head +
         FLASHATTN_INT64(row) * strides.row;
}

inline FLASHATTN_INT64 scalar_index(ScalarStrides strides, uint b, uint head, uint row) {
  return FLASHATTN_INT64(b) * strides.batch + FLASHATTN_INT64(head) * strides.head +
         FLASHATTN_INT64(row) * strides.row;
}

template <uint count>
void fill_zero(thread simdgroup_float8x8 (&fragments)[count]) {
#pragma clang loop unroll(full)
  for (uint f = 0; f < count; ++f) fragments[f] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

// Loads a strip of `count` fragments side by side.
template <uint count>
void load_strip(thread simdgroup_float8x8 (&fragments)[count], threadgroup const float* strip,
                uint stride) {
#pragma clang loop unroll(full)
  for (uint f = 0; f < count; ++f) simdgroup_load(fragments[f], strip + f * kFragment, stride);
}

template <uint count>
void store_strip(thread simdgroup_float8x8 (&fragments)[count], threadgroup float* strip,
                 uint stride) {
#pragma clang loop unroll(full)
  for (uint f = 0; f < count; ++f) simdgroup_store(fragments[f], strip + f * kFragment, stride);
}

// product = strip (8 x 8 inner) * tile^T: the scores of 8 rows against the tile's rows. At most 32
// products are summed in one chain: a chain over a long row would round three times as badly.
template <uint inner, uint columns>
void multiply_transposed(thread simdgroup_float8x8 (&product)[columns],
                         thread simdgroup_float8x8 (&strip)[inner], threadgroup const float* tile,
                         uint tile_stride) {
  constexpr uint chain = 4;  // fragments
  fill_zero(product);
#pragma clang loop unroll(full)
  for (uint first = 0; first < inner; first += chain) {
    simdgroup_float8x8 part[columns];
    fill_zero(part);
#pragma clang loop unroll(full)
    for (uint d = first; d < min(first + chain, inner); ++d) {
#pragma clang loop unroll(full)
      for (uint j = 0; j < columns; ++j) {
        simdgroup_float8x8 transposed;
        simdgroup_load(transposed, tile + j * kFragment * tile_stride + d * kFragment, tile_stride,
                       ulong2(0, 0), true);
        simdgroup_multiply_accumulate(part[j], strip[d], transposed, part[j]);
      }
    }
#pragma clang loop unroll(full)
    for (uint j = 0; j < columns; ++j) {
      product[j].thread_elements()[0] += part[j].thread_elements()[0];
      product[j].thread_elements()[1] += part[j].thread_elements()[1];
    }
  }
}

// sum += weights (8 rows, stored in threadgroup memory) * tile. The tile's own products are summed
// first and added once: a row that meets many tiles rounds its total once a tile, not once a
// column.
template <uint inner, uint columns>
void multiply_accumulate(thread simdgroup_float8x8 (&sum)[columns],
                         threadgroup const float* weights, uint weights_stride,
                         threadgroup const float* tile, uint tile_stride) {
  simdgroup_float8x8 weight[inner];
  load_strip(weight, weights, weights_stride);
#pragma clang loop unroll(full)
  for (uint d = 0; d < columns; ++d) {
    simdgroup_float8x8 total = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
#pragma clang loop unroll(full)
    for (uint j = 0; j < inner; ++j) {
      simdgroup_float8x8 values;
      simdgroup_load(values, tile + j * kFragment * tile_stride + d * kFragment, tile_stride);
      simdgroup_multiply_accumulate(total, weight[j], values, total);
    }
    sum[d].thread_elements()[0] += total.thread_elements()[0];
    sum[d].thread_elements()[1] += total.thread_elements()[1];
  }
}

// The same sum for a tile with values that are not finite: a weight of 0 times such a value would
// poison a row that may not see it. The product takes 0 in their place, so that such a row keeps
// the bits it has without them, and the rows that do see them add them on their own. Bit c of
// visible[r] tells whether row r sees column c. What is added goes through `scratch`, one 8x8 tile
// of this simdgroup.
template <uint inner, uint columns>
void accumulate_selected(thread simdgroup_float8x8 (&sum)[columns],
                         threadgroup const float* weights, uint weights_stride,
                         threadgroup const float* tile, uint tile_stride,
                         threadgroup const uint* visible, threadgroup float* scratch, uint lane) {
  const LaneRow at = lane_row(lane);
#pragma clang loop unroll(full)
  for (uint d = 0; d < columns; ++d) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint c = at.quarter; c < kFragment; c += kLanesPerRow) {
      float total = 0.0f;
      for (uint j = 0; j < inner * kFragment; ++j) {
        const float x = tile[j * tile_stride + d * kFragment + c];
        if ((visible[at.row] >> j & 1u) != 0u && !is_finite_bits(x)) {
          total += weights[at.row * weights_stride + j] * x;
        }
      }
      scratch[at.row * kFragment + c] = total;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 seen;
    simdgroup_load(seen, scratch, kFragment);
    // The order of multiply_accumulate.
    simdgroup_float8x8 total_of_finite = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (uint j = 0; j < inner; ++j) {
      simdgroup_float8x8 weight;
      simdgroup_float8x8 values;
      simdgroup_load(weight, weights + j * kFragment, weights_stride);
      simdgroup_load(values, tile + j * kFragment * tile_stride + d * kFragment, tile_stride);
      values.thread_elements()[0] = finite_or_zero(values.thread_elements()[0]);
      values.thread_elements()[1] = finite_or_zero(values.thread_elements()[1]);
      simdgroup_multiply_accumulate(total_of_finite, weight, values, total_of_finite);
    }
    sum[d].thread_elements()[0] += total_of_finite.thread_elements()[0];
    sum[d].thread_elements()[1] += total_of_finite.thread_elements()[1];
    sum[d].thread_elements()[0] += seen.thread_elements()[0];
    sum[d].thread_elements()[1] += seen.thread_elements()[1];
  }
}

// Multiplies each row of a strip by its lane's factor. The factors go through an 8x8 tile whose
// columns are all alike and are applied elementwise: a diagonal matrix product would turn one row's
// NaN into eight.
template <uint columns>
void scale_rows(thread simdgroup_float8x8 (&strip)[columns], float factor,
                threadgroup float* scratch, uint lane) {
  const LaneRow at = lane_row(lane);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  scratch[at.row * kFragment + at.quarter] = factor;
  scratch[at.row * kFragment + at.quarter + kLanesPerRow] = factor;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_float8x8 factors;
  simdgroup_load(factors, scratch, kFragment);
#pragma clang loop unroll(full)
  for (uint d = 0; d < columns; ++d) {
    strip[d].thread_elements()[0] *= factors.thread_elements()[0];
    strip[d].thread_elements()[1] *= factors.thread_elements()[1];
  }
}

template <uint columns>
void scale_strip(thread simdgroup_float8x8 (&strip)[columns], float factor) {
#pragma clang loop unroll(full)
  for (uint d = 0; d < columns; ++d) {
    strip[d].thread_elements()[0] *= factor;
    strip[d].thread_elements()[1] *= factor;
  }
}

// Bit c tells whether column first + c of a block lies in `range`.
template <uint block>
uint columns_in(Range range, uint first) {
  uint bits = 0;
  for (uint c = 0; c < block; ++c) {
    const int column = int(first + c);
    if (column >= range.begin && column < range.end) bits |= 1u << c;
  }
  return bits;
}

// The same without the rows that have no weights (log-sum-exp -inf).
template <uint block>
uint visible_columns(threadgroup const float* column_lse, uint first, Range range) {
  uint bits = columns_in<block>(range, first);
  for (uint c = 0; c < block; ++c) {
    if (column_lse[c] == -INFINITY) bits &= ~(1u << c);
  }
  return bits;
}

// Sum and maximum over the four lanes of a row; every one of them gets the result.
inline float row_sum4(float x) {
  x += simd_shuffle_xor(x, 1);
  return x + simd_shuffle_xor(x, 2);
}

inline float row_max4(float x) {
  x = max(x, simd_shuffle_xor(x, 1));
  return max(x, simd_shuffle_xor(x, 2));
}

// Sum over a simdgroup, for every lane: a fixed tree, so the same bits on every device.
inline float simdgroup_total(float x) {
  for (ushort step = 16; step > 0; step /= 2) x += simd_shuffle_xor(x, step);
  return x;
}

// Makes a kernel template available under a name: the host appends one such line per pipeline.
#define FLASHATTN_INSTANTIATE(name, function, ...) \
  template [[host_name(name)]] [[kernel]] decltype(function<__VA_ARGS__>) function<__VA_ARGS__>;
