// Tiles of keys and values of register kernels, from wherever the call has them: rows one stride
// apart, or in pages that are found through the block table.
#pragma once

#include "pages.h"
#include "register_tile.h"

// The keys, or values, of one head of an entry.
template <typename T>
struct KeyRows {
  device const T* first;     // row 0 of the entry; of pages, row 0 of page 0
  device const uint* pages;  // 32-bit, the entry's row of the block table
  uint first_row;            // of pages: the entry's first row in them
  uint page_rows;
};

template <typename T>
KeyRows<T> key_rows(device const T* base, TensorStrides strides, EntryRows entry,
                    device const uint* block_table, uint head) {
  KeyRows<T> rows;
  if (is_paged) {
    rows.first = base + FLASHATTN_INT64(head) * strides.head;
    rows.pages = block_table + entry.first_page;
    rows.first_row = entry.key_row;
    rows.page_rows = entry.page_rows;
  } else {
    rows.first = key_pointer(base, strides, entry, head, 0);
  }
  return rows;
}

// Rows [first, first + valid_rows) into a tile, as stage_tile. Pages are read four elements at a
// time where rows are, and looked up for every one of them: a page may begin anywhere in a tile.
template <uint rows, uint columns, uint stride, uint threads, typename F, typename T>
void stage_key_tile(threadgroup F* tile, KeyRows<T> source, TensorStrides strides, uint first,
                    uint valid_rows, uint dim, uint thread_index) {
  if (!is_paged) {
    stage_tile<rows, columns, stride, threads>(tile,
                                               source.first + FLASHATTN_INT64(first) * strides.row,
                                               strides, valid_rows, dim, thread_index);
    return;
  }
  constexpr uint vectors = columns / 4;
  for (uint e = thread_index; e < rows * vectors; e += threads) {
    const uint r = e / vectors;
    const uint d = e % vectors * 4;
    vec<F, 4> x = vec<F, 4>(F(0.0f));
    if (r < valid_rows && d < dim) {
      const uint at = source.first_row + first + r;
      device const T* row = source.first +
                            FLASHATTN_INT64(source.pages[at / source.page_rows]) * strides.batch +
                            FLASHATTN_INT64(at % source.page_rows) * strides.row;
      if (vector_rows) {
        x = load_vector(row + d);
      } else {
#pragma clang loop unroll(full)
        for (uint n = 0; n < 4; ++n) {
          if (d + n < dim) x[n] = F(to_float(row[FLASHATTN_INT64(d + n) * strides.dim]));
        }
      }
    }
    *(threadgroup vec<F, 4>*)(tile + (r * stride + d)) = x;
  }
}
