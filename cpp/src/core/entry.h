// Entry: where one batch entry's rows lie in the arrays and how many there are. In a plain call
// entry b is all of batch index b; packed sequences, pages and left padding differ from entry to
// entry. A plain aggregate that kernels read; core/make_visibility.h makes it.
#pragma once

#include <cstdint>

namespace flashattn {

// Row 0 of an entry in an array: an index on the batch axis (0 for packed sequences; with pages the
// row of the block table) and a row of that.
struct RowPlace {
  std::int64_t batch = 0;
  std::int64_t row = 0;
};

struct Entry {
  RowPlace query{};  // of query, out and everything in their shape
  RowPlace key{};    // of key and value
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;  // rows of key, those past a key length included
};

}  // namespace flashattn
