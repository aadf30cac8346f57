// Where the rows of a batch entry lie: the shader side of cpp/src/core/entry.h. In a plain call
// entry b is all of batch index b, and nothing is read for it; packed sequences, left padding and
// pages take a table. It relies on tile.h.
#pragma once

#include <metal_stdlib>

#include "abi.h"
#include "tile.h"

constant bool is_ragged [[function_constant(kConstantIsRagged)]];

// What a kernel declares to find its rows; bound only for a ragged call.
#define FLASHATTN_ENTRY_ARGUMENT \
  device const EntryRows* entries [[buffer(kBufferEntries), function_constant(is_ragged)]]

inline EntryRows entry_rows(constant AttentionParams& params, device const EntryRows* entries,
                            uint b) {
  if (is_ragged) return entries[b];
  EntryRows entry;
  entry.query_batch = b;
  entry.query_row = 0;
  entry.key_batch = b;
  entry.key_row = 0;
  entry.seqlen_q = params.seqlen_q;
  entry.seqlen_k = params.seqlen_k;
  entry.first_page = 0;
  entry.page_rows = 0;
  return entry;
}

// First element of query row `row` of one head, and of a key row.
template <typename T>
device T* query_pointer(device T* base, TensorStrides strides, EntryRows entry, uint head,
                        uint row) {
  return row_pointer(base, strides, entry.query_batch, head, entry.query_row + row);
}

template <typename T>
device T* key_pointer(device T* base, TensorStrides strides, EntryRows entry, uint head, uint row) {
  return row_pointer(base, strides, entry.key_batch, head, entry.key_row + row);
}

// Index of a query row in lse or dlse.
inline FLASHATTN_INT64 query_index(ScalarStrides strides, EntryRows entry, uint head, uint row) {
  return scalar_index(strides, entry.query_batch, head, entry.query_row + row);
}

// Index of the first chunk of a query row in a contiguous (batch, query_heads, few_rows, chunks)
// table: the parts of split rows.
inline FLASHATTN_INT64 partial_index(constant AttentionParams& params, uint b, uint h, uint row) {
  const FLASHATTN_INT64 head = FLASHATTN_INT64(b) * params.query_heads + h;
  return (head * params.few_rows + row) * params.chunks;
}

// Index of query row 0 in a contiguous (batch, query_heads, rows) table: delta, slope_rows.
inline FLASHATTN_INT64 table_index(constant AttentionParams& params, EntryRows entry, uint head) {
  return (FLASHATTN_INT64(entry.query_batch) * params.query_heads + head) * params.table_rows +
         entry.query_row;
}
