// Rows on their way into a cache: strided copies of any dtype, turned by rotary embeddings on the
// way. Relies on checked arguments in host memory; kv_cache.cpp checks them.
#pragma once

#include <cstdint>
#include <vector>

#include "core/entry.h"
#include "flashattn/kv_cache.h"

namespace flashattn {

// Where an entry's new rows go, and where they stand.
struct AppendPlace {
  RowPlace first{};                     // of the cache: a batch index (of pages: unused) and a row
  const std::int64_t* pages = nullptr;  // the entry's row of the block table, or null
  std::int64_t position = 0;            // of its first new row, for the rotation
};

// cache[place of b + t] = rows[b][t] for all entries b and their rows t; `page_size` is 0 without
// pages. `rotary.cos` may be absent.
void append_rows(const TensorView& cache, const TensorView& rows,
                 const std::vector<AppendPlace>& places, std::int64_t page_size,
                 const Rotary& rotary);

// to[b][i] = rows[b][i] turned by the position of new row i of the entry, or of row 0 for all i.
void rotate_rows(const TensorView& to, const TensorView& rows,
                 const std::vector<AppendPlace>& places, bool advances, const Rotary& rotary);

}  // namespace flashattn
