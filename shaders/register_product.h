// Matrix products of the register kernels: a simdgroup's strips of rows, in fragments, with a tile
// in threadgroup memory. Sums are float and are formed in parts, so that long ones round as well as
// those of a library's matrix product.
#pragma once

#include "register_tile.h"

// Products that are summed in one chain, in fragments. A chain over a long row of float would round
// several times as badly as sums in parts do; 16-bit inputs are rounded more coarsely than any
// chain.
template <typename T>
constexpr uint chain_of(uint count) {
  return sizeof(T) == sizeof(float) && count > 4 ? 4 : count;
}

// total = part, or total += part.
inline void add_part(thread simdgroup_float8x8& total, thread simdgroup_float8x8& part,
                     bool first) {
  total.thread_elements()[0] =
      first ? part.thread_elements()[0] : total.thread_elements()[0] + part.thread_elements()[0];
  total.thread_elements()[1] =
      first ? part.thread_elements()[1] : total.thread_elements()[1] + part.thread_elements()[1];
}

// part += row * tile^T for one fragment of each; `first` starts the sum.
template <typename F>
void multiply_step(thread simdgroup_float8x8& part, thread simdgroup_matrix<F, 8, 8>& row,
                   thread simdgroup_matrix<F, 8, 8>& factor, bool first) {
  if (first) {
    simdgroup_multiply(part, row, factor);
  } else {
    simdgroup_multiply_accumulate(part, row, factor, part);
  }
}

template <uint tile_stride, typename F>
void load_transposed(thread simdgroup_matrix<F, 8, 8>& factor, threadgroup const F* tile, uint j,
                     uint d) {
  simdgroup_load(factor, tile + (j * kFragment * tile_stride + d * kFragment), tile_stride,
                 ulong2(0, 0), true);
}

// product = rows * tile^T, with all of the rows' `count` fragments in registers: tile row by tile
// row, so that one part per strip is all that is added to.
template <typename T, uint count, uint tile_stride, uint row_fragments, uint columns, typename F>
void multiply_held(thread simdgroup_float8x8 (&product)[row_fragments][columns],
                   thread simdgroup_matrix<F, 8, 8> (&rows)[row_fragments][count],
                   threadgroup const F* tile) {
  constexpr uint chain = chain_of<T>(count);
#pragma clang loop unroll(full)
  for (uint j = 0; j < columns; ++j) {
#pragma clang loop unroll(full)
    for (uint first = 0; first < count; first += chain) {
      simdgroup_float8x8 part[row_fragments];
#pragma clang loop unroll(full)
      for (uint d = first; d < min(first + chain, count); ++d) {
        simdgroup_matrix<F, 8, 8> factor;
        load_transposed<tile_stride>(factor, tile, j, d);
#pragma clang loop unroll(full)
        for (uint r = 0; r < row_fragments; ++r) {
          multiply_step(part[r], rows[r][d], factor, d == first);
        }
      }
#pragma clang loop unroll(full)
      for (uint r = 0; r < row_fragments; ++r) add_part(product[r][j], part[r], first == 0);
    }
  }
}

// Fragments [first, first + steps) of the sum below: what they come to starts `part`, or is added
// to it one by one.
template <uint steps, uint tile_stride, typename T, uint row_fragments, uint columns, typename F>
__attribute__((always_inline)) void multiply_read_steps(
    thread simdgroup_float8x8 (&part)[row_fragments][columns],
    thread simdgroup_matrix<F, 8, 8> (&rows)[row_fragments][1], threadgroup const F* tile,
    device const T* source, TensorStrides strides, int valid_rows, uint first, uint dim,
    bool starts, LaneMap map) {
#pragma clang loop unroll(full)
  for (uint step = 0; step < steps; ++step) {
    const uint d = first + step;
#pragma clang loop unroll(full)
    for (uint r = 0; r < row_fragments; ++r) {
      load_fragment(rows[r][0], strip_pointer(source, strides, r), strides,
                    valid_rows - int(r * kFragment), d, dim, map);
    }
#pragma clang loop unroll(full)
    for (uint j = 0; j < columns; ++j) {
      simdgroup_matrix<F, 8, 8> factor;
      load_transposed<tile_stride>(factor, tile, j, d);
#pragma clang loop unroll(full)
      for (uint r = 0; r < row_fragments; ++r) {
        multiply_step(part[r][j], rows[r][0], factor, starts && step == 0);
      }
    }
  }
}

// The next `steps` fragments, from `first` on: as a part of the sum or, of 16-bit inputs, in its
// one chain.
template <uint steps, bool in_parts, uint tile_stride, typename T, uint row_fragments, uint columns,
          typename F>
__attribute__((always_inline)) void multiply_read_part(
    thread simdgroup_float8x8 (&product)[row_fragments][columns],
    thread simdgroup_matrix<F, 8, 8> (&rows)[row_fragments][1], threadgroup const F* tile,
    device const T* source, TensorStrides strides, int valid_rows, uint first, uint dim,
    LaneMap map) {
  if (!in_parts) {
    multiply_read_steps<steps, tile_stride>(product, rows, tile, source, strides, valid_rows, first,
                                            dim, false, map);
    return;
  }
  simdgroup_float8x8 part[row_fragments][columns];
  multiply_read_steps<steps, tile_stride>(part, rows, tile, source, strides, valid_rows, first, dim,
                                          true, map);
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) {
#pragma clang loop unroll(full)
    for (uint j = 0; j < columns; ++j) add_part(product[r][j], part[r][j], false);
  }
}

// The same with rows read fragment by fragment, each once: all tile rows at a time. Where elements
// of a long row are converted on the way, the loop stays one: unrolled it would load far ahead,
// into registers that there are not.
template <typename T, uint count, uint tile_stride, uint row_fragments, uint columns, typename F>
void multiply_read(thread simdgroup_float8x8 (&product)[row_fragments][columns],
                   thread simdgroup_matrix<F, 8, 8> (&rows)[row_fragments][1],
                   threadgroup const F* tile, device const T* source, TensorStrides strides,
                   int valid_rows, uint dim, LaneMap map) {
  constexpr uint steps = count > 4 ? 4 : count;
  constexpr uint rest = count % steps;
  constexpr bool in_parts = chain_of<T>(count) != count;
  multiply_read_steps<steps, tile_stride>(product, rows, tile, source, strides, valid_rows, 0, dim,
                                          true, map);
  if (SameType<F, T>::value == 1 || count <= 16) {
#pragma clang loop unroll(full)
    for (uint first = steps; first + steps <= count; first += steps) {
      multiply_read_part<steps, in_parts, tile_stride>(product, rows, tile, source, strides,
                                                       valid_rows, first, dim, map);
    }
  } else {
#pragma clang loop unroll(disable)
    for (uint first = steps; first + steps <= count; first += steps) {
      multiply_read_part<steps, in_parts, tile_stride>(product, rows, tile, source, strides,
                                                       valid_rows, first, dim, map);
    }
  }
  if (rest != 0) {
    multiply_read_part<(rest > 0 ? rest : 1), in_parts, tile_stride>(
        product, rows, tile, source, strides, valid_rows, count - rest, dim, map);
  }
}

// product = rows * tile^T, where rows are held, or read from `source`.
template <uint count, uint tile_stride, typename T, uint row_fragments, uint columns, typename F>
void multiply_by_transposed(thread simdgroup_float8x8 (&product)[row_fragments][columns],
                            thread simdgroup_matrix<F, 8, 8> (&rows)[row_fragments][count],
                            threadgroup const F* tile, device const T* source,
                            TensorStrides strides, int valid_rows, uint dim, LaneMap map) {
  multiply_held<T, count, tile_stride>(product, rows, tile);
}
template <uint count, uint tile_stride, typename T, uint row_fragments, uint columns, typename F>
void multiply_by_transposed(thread simdgroup_float8x8 (&product)[row_fragments][columns],
                            thread simdgroup_matrix<F, 8, 8> (&rows)[row_fragments][1],
                            threadgroup const F* tile, device const T* source,
                            TensorStrides strides, int valid_rows, uint dim, LaneMap map) {
  multiply_read<T, count, tile_stride>(product, rows, tile, source, strides, valid_rows, dim, map);
}

// sum += weights * tile. The tile's own products are summed first and added once: a row that meets
// many tiles rounds its total once a tile.
template <uint tile_stride, uint row_fragments, uint inner, uint columns, typename F>
void add_product(thread simdgroup_float8x8 (&sum)[row_fragments][columns],
                 thread simdgroup_matrix<F, 8, 8> (&weights)[row_fragments][inner],
                 threadgroup const F* tile) {
#pragma clang loop unroll(full)
  for (uint d = 0; d < columns; ++d) {
    simdgroup_float8x8 total[row_fragments];
#pragma clang loop unroll(full)
    for (uint j = 0; j < inner; ++j) {
      simdgroup_matrix<F, 8, 8> factor;
      simdgroup_load(factor, tile + (j * kFragment * tile_stride + d * kFragment), tile_stride);
#pragma clang loop unroll(full)
      for (uint r = 0; r < row_fragments; ++r) {
        if (j == 0) {
          simdgroup_multiply(total[r], weights[r][j], factor);
        } else {
          simdgroup_multiply_accumulate(total[r], weights[r][j], factor, total[r]);
        }
      }
    }
#pragma clang loop unroll(full)
    for (uint r = 0; r < row_fragments; ++r) {
      sum[r][d].thread_elements()[0] += total[r].thread_elements()[0];
      sum[r][d].thread_elements()[1] += total[r].thread_elements()[1];
    }
  }
}
