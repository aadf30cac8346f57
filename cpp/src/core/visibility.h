// Visibility: which keys a query row may see, and what that makes of a tile of scores.
// Causal masks, windows, key lengths and position offsets all reduce to one half-open key interval
// per row,
//   keys(i) = [max(0, i + shift - left), min(key_limit, i + shift + right + 1)),
// whose ends rise with i. Everything here is a function of those four numbers, so it is written
// once and shared by every backend. Boolean and additive masks are not intervals and are not
// handled here.
#pragma once

#include <cstdint>

#include "core/inline.h"

namespace flashattn {

// Far enough for "unlimited", small enough that sums of a few cannot overflow.
inline constexpr std::int64_t kUnlimited = std::int64_t{1} << 61;

struct Interval {
  std::int64_t begin = 0;
  std::int64_t end = 0;  // one past the last; begin >= end is empty
};

enum class TileVisibility : std::uint8_t { kNone, kMixed, kAll };

// One batch entry's rule, a plain aggregate that kernels read.
struct Visibility {
  std::int64_t seqlen_q = 0;
  std::int64_t key_limit = 0;  // keys at and past it do not exist
  std::int64_t shift = 0;      // row i stands at key coordinate i + shift
  std::int64_t left = kUnlimited;
  std::int64_t right = kUnlimited;  // 0 is causal

  // Keys that row i sees.
  FLASHATTN_INLINE Interval keys_of_row(std::int64_t i) const {
    const std::int64_t at = i + shift;
    std::int64_t begin = at - left > 0 ? at - left : 0;
    if (begin > key_limit) begin = key_limit;  // a window wholly past the last key
    const std::int64_t end = at + right + 1 < key_limit ? at + right + 1 : key_limit;
    return {begin, end > begin ? end : begin};
  }

  // Keys that some row of [row_begin, row_end) sees: the range a query block has to visit.
  FLASHATTN_INLINE Interval keys_of_rows(std::int64_t row_begin, std::int64_t row_end) const {
    if (row_begin >= row_end) return {0, 0};
    const std::int64_t begin = keys_of_row(row_begin).begin;
    const std::int64_t end = keys_of_row(row_end - 1).end;
    return {begin, end > begin ? end : begin};
  }

  // Rows that see some key of [key_begin, key_end): the range a key block has to visit.
  FLASHATTN_INLINE Interval rows_of_keys(std::int64_t key_begin, std::int64_t key_end) const {
    if (key_end > key_limit) key_end = key_limit;
    if (key_begin >= key_end) return {0, 0};
    std::int64_t begin = key_begin - right - shift;
    std::int64_t end = key_end - 1 + left - shift + 1;
    if (begin < 0) begin = 0;
    if (begin > seqlen_q) begin = seqlen_q;
    if (end > seqlen_q) end = seqlen_q;
    return {begin, end > begin ? end : begin};
  }

  // Whether rows [row_begin, row_end) see all, some or none of keys [key_begin, key_end).
  FLASHATTN_INLINE TileVisibility tile(std::int64_t row_begin, std::int64_t row_end,
                                       std::int64_t key_begin, std::int64_t key_end) const {
    const Interval any = keys_of_rows(row_begin, row_end);
    if (any.begin >= key_end || any.end <= key_begin || any.begin >= any.end) {
      return TileVisibility::kNone;
    }
    // The ends rise with the row, so what every row sees lies between the last begin and the first
    // end.
    const std::int64_t begin = keys_of_row(row_end - 1).begin;
    const std::int64_t end = keys_of_row(row_begin).end;
    return begin <= key_begin && key_end <= end ? TileVisibility::kAll : TileVisibility::kMixed;
  }
};

}  // namespace flashattn
