// Blocks of rows in the forms that the tile kernel reads: contiguous rows of units, interleaved row
// pairs, and transposes. Everything is padded with zeros, so that no kernel has a ragged edge.
//
// "ld" is a leading dimension in 32-bit units. Rows at and past valid_end do not exist and become
// zeros.
#pragma once

#include "cpu/rows.h"
#include "cpu/tile.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// 32-bit units that a row of `dim` elements takes along the contraction.
template <class Unit>
FLASHATTN_INLINE std::int64_t units_of(std::int64_t dim) {
  return (dim + Unit::kElements - 1) / Unit::kElements;
}

FLASHATTN_INLINE void zero_units(float* to, std::int64_t count) {
  if (count > 0) __builtin_memset(to, 0, static_cast<std::size_t>(count) * sizeof(float));
}

// to[r - begin][0..ld) = row r as float32, for r in [begin, end).
static inline void pack_rows_float32(const Rows& rows, std::int64_t begin, std::int64_t end,
                                     std::int64_t valid_end, std::int64_t dim, float* to,
                                     std::int64_t ld) {
  for (std::int64_t r = begin; r < end; ++r, to += ld) {
    if (r < valid_end) {
      read_row(rows, r, dim, to);
      zero_units(to + dim, ld - dim);
    } else {
      zero_units(to, ld);
    }
  }
}

// to[r - begin][0..ld) = row r as pairs of neighbouring bf16 elements; an odd dim is padded with
// one zero.
static inline void pack_rows_bf16(const Rows& rows, std::int64_t begin, std::int64_t end,
                                  std::int64_t valid_end, std::int64_t dim, float* to,
                                  std::int64_t ld) {
  for (std::int64_t r = begin; r < end; ++r, to += ld) {
    if (r < valid_end) {
      zero_units(to + dim / 2, ld - dim / 2);
      read_row_bits16(rows, r, dim, reinterpret_cast<std::uint16_t*>(to));
    } else {
      zero_units(to, ld);
    }
  }
}

// to[d] = (even[d], odd[d]) for d < dim: two rows of 16-bit elements as one row of pairs.
FLASHATTN_INLINE void interleave_rows16(const std::uint16_t* even, const std::uint16_t* odd,
                                        std::int64_t dim, float* to) {
  std::int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    const VecU low = widen_uint16(even + d);
    const VecU high = widen_uint16(odd + d);
    store(to + d, reinterpret_cast<Vec>(low | (high << 16)));
  }
  for (; d < dim; ++d) {
    const std::uint32_t pair = even[d] | (static_cast<std::uint32_t>(odd[d]) << 16);
    __builtin_memcpy(to + d, &pair, sizeof(pair));
  }
}

// One kLanes x kLanes block of 32-bit units, or its top-left valid_rows x valid_cols part with
// zeros around: to[c][r] = from[r][c]. Strides: from_bytes between rows of `from`, ld units between
// rows of `to`; all of to[0..valid_cols)[0..kLanes) is written.
FLASHATTN_INLINE void transpose_block(const char* from, std::ptrdiff_t from_bytes,
                                      std::int64_t valid_rows, std::int64_t valid_cols, float* to,
                                      std::int64_t ld) {
  Vec r[kLanes];
  if (valid_rows >= kLanes && valid_cols >= kLanes) {
    FLASHATTN_UNROLL for (int i = 0; i < kLanes; ++i) r[i] = load(from + i * from_bytes);
    transpose(r);
    FLASHATTN_UNROLL for (int i = 0; i < kLanes; ++i) store(to + i * ld, r[i]);
    return;
  }
  alignas(64) float block[kLanes * kLanes] = {};
  const std::int64_t cols = valid_cols < kLanes ? valid_cols : kLanes;
  for (std::int64_t i = 0; i < kLanes && i < valid_rows; ++i) {
    __builtin_memcpy(block + i * kLanes, from + i * from_bytes,
                     static_cast<std::size_t>(cols) * sizeof(float));
  }
  FLASHATTN_UNROLL for (int i = 0; i < kLanes; ++i) r[i] = load(block + i * kLanes);
  transpose(r);
  FLASHATTN_UNROLL for (int i = 0; i < kLanes; ++i) store(block + i * kLanes, r[i]);
  for (std::int64_t i = 0; i < cols; ++i) store(to + i * ld, load(block + i * kLanes));
}

// to[c][r] = from[r][c] for c < cols and r < rows, rows a multiple of kLanes; rows at and past
// valid_rows are 0.
static inline void transpose_units(const char* from, std::ptrdiff_t from_bytes,
                                   std::int64_t valid_rows, std::int64_t rows, std::int64_t cols,
                                   float* to, std::int64_t ld) {
  for (std::int64_t r = 0; r < rows; r += kLanes) {
    for (std::int64_t c = 0; c < cols; c += kLanes) {
      transpose_block(from + r * from_bytes + c * 4, from_bytes, valid_rows - r, cols - c,
                      to + c * ld + r, ld);
    }
  }
}

// to[u][i] = unit u of row begin + i, for i < lanes (a multiple of kLanes), ld apart; lanes without
// a row are zero. staging: lanes x units_of(dim) floats, used when the rows cannot be read in
// place.
template <class Unit>
static void transpose_rows(const Rows& rows, std::int64_t begin, std::int64_t valid_end,
                           std::int64_t lanes, std::int64_t dim, float* to, std::int64_t ld,
                           float* staging) {
  const std::int64_t units = units_of<Unit>(dim);
  const std::int64_t left = valid_end - begin;
  const std::int64_t count = left < lanes ? (left > 0 ? left : 0) : lanes;
  const bool whole_units = Unit::kElements == 2 ? dim % 2 == 0 : rows.dtype == DType::kFloat32;
  if (whole_units && rows.contiguous_rows()) {
    transpose_units(rows.row(begin), rows.row_bytes, count, lanes, units, to, ld);
    return;
  }
  if constexpr (Unit::kElements == 2) {
    pack_rows_bf16(rows, begin, begin + count, valid_end, dim, staging, units);
  } else {
    pack_rows_float32(rows, begin, begin + count, valid_end, dim, staging, units);
  }
  transpose_units(reinterpret_cast<const char*>(staging), units * 4, count, lanes, units, to, ld);
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
