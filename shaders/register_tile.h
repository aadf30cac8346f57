// What the register kernels move: tiles of the other side from device to threadgroup memory, rows
// of the own side between device memory and matrix fragments. T is the storage type, F the type of
// the matrix factors: half for float16, else float. Sums are always float.
#pragma once

#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "abi.h"
#include "lane_map.h"
#include "storage.h"
#include "tile.h"

using namespace metal;

// Every row that this dispatch owns exists.
constant bool full_rows [[function_constant(kConstantFullRows)]];
// Rows of every tensor that a kernel reads in blocks are contiguous, their dimensions multiples of
// 4, and a block of rows spans less than 2^31 elements.
constant bool vector_rows [[function_constant(kConstantVectorRows)]];
// head_dim and value_dim fill their tiles.
constant bool exact_tiles [[function_constant(kConstantExactTiles)]];

// Four elements at once; the packed types ask for no alignment beyond an element's.
inline float4 load_vector(device const float* source) {
  return *(device const packed_float4*)source;
}
inline half4 load_vector(device const half* source) { return *(device const packed_half4*)source; }
inline float4 load_vector(device const Bfloat16* source) {
  const ushort4 bits = *(device const packed_ushort4*)source;
  return float4(as_type<float>(uint(bits[0]) << 16), as_type<float>(uint(bits[1]) << 16),
                as_type<float>(uint(bits[2]) << 16), as_type<float>(uint(bits[3]) << 16));
}

inline void assign(thread float& target, float x) { target = x; }
inline void assign(thread half& target, float x) { target = half(x); }

inline float finite_part(float x) { return finite_or_zero(x); }
inline half finite_part(half x) { return is_finite_bits(float(x)) ? x : half(0.0f); }

// Row length of a tile in threadgroup memory: 16 bytes of padding keep row and transposed access
// off each other's banks.
template <typename F>
constexpr uint padded(uint columns) {
  return columns + 16 / uint(sizeof(F));
}

// Copies `valid_rows` rows of `dim` elements into a tile of rows x columns, zero outside. `source`
// points at the first row's first element; `stride` is the tile's. The tile is aligned to 16 bytes.
template <uint rows, uint columns, uint stride, uint threads, typename F, typename T>
void stage_tile(threadgroup F* tile, device const T* source, TensorStrides strides, uint valid_rows,
                uint dim, uint thread_index) {
  if (vector_rows) {
    constexpr uint vectors = columns / 4;
    const uint row_stride = uint(strides.row);
#pragma clang loop unroll(full)
    for (uint step = 0; step < (rows * vectors + threads - 1) / threads; ++step) {
      const uint e = step * threads + thread_index;
      if (rows * vectors % threads != 0 && e >= rows * vectors) break;
      const uint r = e / vectors;
      const uint d = e % vectors * 4;
      vec<F, 4> x = vec<F, 4>(F(0.0f));
      if (r < valid_rows && (exact_tiles || d < dim))
        x = load_vector(source + (r * row_stride + d));
      *(threadgroup vec<F, 4>*)(tile + (r * stride + d)) = x;
    }
    return;
  }
  for (uint e = thread_index; e < rows * columns; e += threads) {
    const uint r = e / columns;
    const uint d = e % columns;
    float x = 0.0f;
    if (r < valid_rows && d < dim) {
      x = to_float(source[FLASHATTN_INT64(r) * strides.row + FLASHATTN_INT64(d) * strides.dim]);
    }
    tile[r * stride + d] = F(x);
  }
}

// First row of strip r of a simdgroup's rows.
template <typename T>
device T* strip_pointer(device T* rows, TensorStrides strides, uint r) {
  if (vector_rows) return rows + r * kFragment * uint(strides.row);
  return rows + FLASHATTN_INT64(r * kFragment) * strides.row;
}

// One 8x8 factor of rows in device memory: fragment d of a strip whose first row `source` points
// at, of which `valid_rows` exist.
template <typename F>
void load_whole(thread simdgroup_matrix<F, 8, 8>& fragment, device const F* source, uint stride) {
  simdgroup_load(fragment, source, stride);
}
template <typename F, typename T>
void load_whole(thread simdgroup_matrix<F, 8, 8>& fragment, device const T* source, uint stride) {}

template <typename F, typename T>
struct SameType {
  enum : uint { value = 0 };
};
template <typename F>
struct SameType<F, F> {
  enum : uint { value = 1 };
};

template <typename F, typename T>
void load_fragment(thread simdgroup_matrix<F, 8, 8>& fragment, device const T* source,
                   TensorStrides strides, int valid_rows, uint d, uint dim, LaneMap map) {
  if (SameType<F, T>::value == 1 && full_rows && vector_rows && exact_tiles) {
    load_whole(fragment, source + d * kFragment, uint(strides.row));
    return;
  }
  const uint column0 = d * kFragment + map.column0;
  const uint column1 = d * kFragment + map.column1;
  float x0 = 0.0f;
  float x1 = 0.0f;
  const bool exists0 = (full_rows || int(map.row0) < valid_rows) && (exact_tiles || column0 < dim);
  const bool exists1 = (full_rows || int(map.row1) < valid_rows) && (exact_tiles || column1 < dim);
  if (vector_rows) {
    const uint row_stride = uint(strides.row);
    if (exists0) x0 = to_float(source[map.row0 * row_stride + column0]);
    if (exists1) x1 = to_float(source[map.row1 * row_stride + column1]);
  } else {
    if (exists0) {
      x0 = to_float(
          source[FLASHATTN_INT64(map.row0) * strides.row + FLASHATTN_INT64(column0) * strides.dim]);
    }
    if (exists1) {
      x1 = to_float(
          source[FLASHATTN_INT64(map.row1) * strides.row + FLASHATTN_INT64(column1) * strides.dim]);
    }
  }
  fragment.thread_elements()[0] = F(x0);
  fragment.thread_elements()[1] = F(x1);
}

// The factors of `row_fragments` strips of 8 rows: all of them (held = fragments of a row), or none
// (held = 1) where a kernel reads them again whenever it needs them.
template <uint row_fragments, uint held, uint count, typename F, typename T>
void load_held(thread simdgroup_matrix<F, 8, 8> (&fragments)[row_fragments][held],
               device const T* source, TensorStrides strides, int valid_rows, uint dim,
               LaneMap map) {
  if (held != count) return;
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
#pragma clang loop unroll(full)
    for (uint d = 0; d < held; ++d) {
      load_fragment(fragments[r][d], strip_pointer(source, strides, r), strides,
                    valid_rows - int(r * kFragment), d, dim, map);
    }
  }
}

// Float scores as factors of the next product.
template <uint row_fragments, uint columns, typename F>
void to_factors(thread simdgroup_matrix<F, 8, 8> (&factors)[row_fragments][columns],
                thread simdgroup_float8x8 (&scores)[row_fragments][columns]) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
#pragma clang loop unroll(full)
    for (uint j = 0; j < columns; ++j) {
      factors[r][j].thread_elements()[0] = F(scores[r][j].thread_elements()[0]);
      factors[r][j].thread_elements()[1] = F(scores[r][j].thread_elements()[1]);
    }
  }
}

template <uint row_fragments, uint columns>
void set_zero(thread simdgroup_float8x8 (&sum)[row_fragments][columns]) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
#pragma clang loop unroll(full)
    for (uint d = 0; d < columns; ++d) sum[r][d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
}

// Writes 8 rows, each element times its factor, or adds them to what is there. `target` points at
// the first row, of which `valid_rows` exist.
template <uint columns, typename T>
void store_strip_rows(thread simdgroup_float8x8 (&strip)[columns], device T* target,
                      TensorStrides strides, int valid_rows, uint dim, float factor0, float factor1,
                      bool accumulate, LaneMap map) {
  const bool exists0 = full_rows || int(map.row0) < valid_rows;
  const bool exists1 = full_rows || int(map.row1) < valid_rows;
  // Stepped along the rows: an address for each element would take a register for each.
  const FLASHATTN_INT64 step = FLASHATTN_INT64(kFragment) * strides.dim;
  device T* at0 =
      target + FLASHATTN_INT64(map.row0) * strides.row + FLASHATTN_INT64(map.column0) * strides.dim;
  device T* at1 =
      target + FLASHATTN_INT64(map.row1) * strides.row + FLASHATTN_INT64(map.column1) * strides.dim;
#pragma clang loop unroll(full)
  for (uint d = 0; d < columns; ++d) {
    if (exists0 && (exact_tiles || d * kFragment + map.column0 < dim)) {
      float x = strip[d].thread_elements()[0] * factor0;
      if (accumulate) x += to_float(*at0);
      store_float(at0, x);
    }
    if (exists1 && (exact_tiles || d * kFragment + map.column1 < dim)) {
      float x = strip[d].thread_elements()[1] * factor1;
      if (accumulate) x += to_float(*at1);
      store_float(at1, x);
    }
    at0 += step;
    at1 += step;
  }
}

// The same for strips below each other, with one factor.
template <uint row_fragments, uint columns, typename T>
void store_strips(thread simdgroup_float8x8 (&strips)[row_fragments][columns], device T* target,
                  TensorStrides strides, int valid_rows, uint dim, float factor, bool accumulate,
                  LaneMap map) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
    store_strip_rows(strips[r], target + FLASHATTN_INT64(r * kFragment) * strides.row, strides,
                     valid_rows - int(r * kFragment), dim, factor, factor, accumulate, map);
  }
}
