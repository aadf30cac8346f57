// Keys and values in pages: rows are found through the block table. It relies on entries.h, and
// does what stage_rows of tile.h does for rows that lie one stride apart.
#pragma once

#include "entries.h"

constant bool is_paged [[function_constant(kConstantIsPaged)]];

// Rows [first, first + valid_rows) of an entry's keys of one head into a tile, as stage_rows;
// `base` is row 0 of page 0 of head 0.
template <uint rows, uint columns, uint threads, typename T>
bool stage_pages(threadgroup float* tile, uint tile_stride, device const T* base,
                 TensorStrides strides, EntryRows entry, device const uint* block_table, uint head,
                 uint first, uint valid_rows, uint dim, uint thread_index) {
  bool non_finite = false;
  for (uint e = thread_index; e < rows * columns; e += threads) {
    const uint r = e / columns;
    const uint d = e % columns;
    float x = 0.0f;
    if (r < valid_rows && d < dim) {
      const uint at = entry.key_row + first + r;
      const uint page = block_table[entry.first_page + at / entry.page_rows];
      device const T* row = row_pointer(base, strides, page, head, at % entry.page_rows);
      x = to_float(row[FLASHATTN_INT64(d) * strides.dim]);
    }
    tile[r * tile_stride + d] = x;
    non_finite = non_finite || !is_finite_bits(x);
  }
  return non_finite;
}

// The same from wherever the call's keys are.
template <uint rows, uint columns, uint threads, typename T>
bool stage_keys(threadgroup float* tile, uint tile_stride, device const T* base,
                TensorStrides strides, EntryRows entry, device const uint* block_table, uint head,
                uint first, uint valid_rows, uint dim, uint thread_index) {
  if (is_paged) {
    return stage_pages<rows, columns, threads>(tile, tile_stride, base, strides, entry, block_table,
                                               head, first, valid_rows, dim, thread_index);
  }
  return stage_rows<rows, columns, threads>(tile, tile_stride,
                                            key_pointer(base, strides, entry, head, first), strides,
                                            valid_rows, dim, thread_index);
}
