// Which keys a query row sees and which query rows see a key: the shader side of
// cpp/src/core/visibility.h. The host has reduced causal masks, windows, key lengths and offsets to
// one RowInterval per batch entry.
#pragma once

#include <metal_stdlib>

#include "abi.h"

// Half-open range of keys or rows.
struct Range {
  int begin;
  int end;
};

// Keys that row i sees. A row at or past seqlen_q sees none.
inline Range keys_of_row(RowInterval interval, uint seqlen_q, uint i) {
  Range range;
  range.begin = metal::max(0, int(i) + interval.begin_offset);
  range.end = i < seqlen_q ? metal::min(interval.key_limit, int(i) + interval.end_offset) : 0;
  return range;
}

// Rows that see key j. A key at or past key_limit is seen by none.
inline Range rows_of_key(RowInterval interval, uint seqlen_q, uint j) {
  Range range;
  range.begin = metal::max(0, int(j) - interval.end_offset + 1);
  range.end = int(j) < interval.key_limit
                  ? metal::min(int(seqlen_q), int(j) - interval.begin_offset + 1)
                  : 0;
  return range;
}

// Keys that some row of [first, first + count) sees: what a query block visits. The ends rise with
// the row.
inline Range keys_of_rows(RowInterval interval, uint seqlen_q, uint first, uint count) {
  const uint last = metal::min(first + count, seqlen_q) - 1;
  Range range;
  range.begin = keys_of_row(interval, seqlen_q, first).begin;
  range.end = keys_of_row(interval, seqlen_q, last).end;
  return range;
}

// Rows that see some key of [first, first + count): what a key block visits.
inline Range rows_of_keys(RowInterval interval, uint seqlen_q, uint first, uint count) {
  const int last = metal::min(int(first + count), interval.key_limit) - 1;
  Range range;
  range.begin = rows_of_key(interval, seqlen_q, first).begin;
  range.end = last < int(first) ? 0 : rows_of_key(interval, seqlen_q, uint(last)).end;
  return range;
}
