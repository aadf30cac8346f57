// What blocks of rows see, for kernels whose simdgroups own rows of one side and visit the other
// side block by block: which blocks to visit, which need no mask, and which elements of a fragment
// a lane may use where one does.
#pragma once

#include <metal_stdlib>

#include "abi.h"
#include "lane_map.h"
#include "visibility.h"

// Ranges along the other side: what some row of a block sees, and what all of them see.
struct BlockRange {
  Range any;
  Range all;
};

inline BlockRange nothing() {
  BlockRange range;
  range.any.begin = range.any.end = range.all.begin = range.all.end = 0;
  return range;
}

// Keys of the query rows [first, first + count); those past seqlen_q do not count.
inline BlockRange keys_of_block(RowInterval interval, uint seqlen_q, uint first, uint count) {
  if (first >= seqlen_q) return nothing();
  const uint last = min(first + count, seqlen_q) - 1;
  BlockRange keys;
  keys.any = keys_of_rows(interval, seqlen_q, first, count);
  keys.all.begin = keys_of_row(interval, seqlen_q, last).begin;
  keys.all.end = keys_of_row(interval, seqlen_q, first).end;
  return keys;
}

// Query rows that see the keys [first, first + count). A key at or past the limit is seen by none.
inline BlockRange rows_of_block(RowInterval interval, uint seqlen_q, uint first, uint count) {
  if (int(first) >= interval.key_limit) return nothing();
  BlockRange rows;
  rows.any = rows_of_keys(interval, seqlen_q, first, count);
  rows.all.begin = rows_of_key(interval, seqlen_q, first + count - 1).begin;
  const bool all_exist = int(first + count) <= interval.key_limit;
  rows.all.end = all_exist ? rows_of_key(interval, seqlen_q, first).end : 0;
  return rows;
}

inline bool overlaps(Range range, int first, uint count) {
  return first < range.end && first + int(count) > range.begin;
}

inline bool covers(Range range, int first, uint count) {
  return first >= range.begin && first + int(count) <= range.end;
}

// A strip of fragments has one word per lane: bits 2 j and 2 j + 1 stand for the lane's two
// elements of fragment j, of the up to 16 that a strip has.
enum ElementBits : uint { kAllElements = 0xffffffffu };

inline bool has_element(uint bits, uint j, uint element) {
  return (bits >> (2 * j + element) & 1u) != 0u;
}

// The elements whose column lies in their row's range; the strip's columns start at `first`.
template <uint columns>
uint elements_in(Range range0, Range range1, int first, LaneMap map) {
  // Columns are counted from the range's begin: one unsigned comparison has both ends.
  const uint column0 = uint(first + int(map.column0) - range0.begin);
  const uint column1 = uint(first + int(map.column1) - range1.begin);
  const uint count0 = uint(max(range0.end - range0.begin, 0));
  const uint count1 = uint(max(range1.end - range1.begin, 0));
  uint bits = 0;
#pragma clang loop unroll(full)
  for (uint j = 0; j < columns; ++j) {
    if (column0 + j * kFragment < count0) bits |= 1u << (2 * j);
    if (column1 + j * kFragment < count1) bits |= 2u << (2 * j);
  }
  return bits;
}

// Sets the elements that a lane may not use.
template <uint columns>
void fill_hidden(thread simdgroup_float8x8 (&strip)[columns], uint bits, float value) {
#pragma clang loop unroll(full)
  for (uint j = 0; j < columns; ++j) {
    if (!has_element(bits, j, 0)) strip[j].thread_elements()[0] = value;
    if (!has_element(bits, j, 1)) strip[j].thread_elements()[1] = value;
  }
}

template <uint row_fragments, uint columns>
void fill_hidden_strips(thread simdgroup_float8x8 (&strips)[row_fragments][columns],
                        thread uint (&visible)[row_fragments], float value) {
#pragma clang loop unroll(full)
  for (uint r = 0; r < row_fragments; ++r) fill_hidden(strips[r], visible[r], value);
}
