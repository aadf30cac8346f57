// One row of a tensor at a time: any dtype and any strides in, contiguous float32 (or untouched
// bf16) out, and back. Relies on vec.h; knows nothing of tiles.
#pragma once

#include "cpu/job.h"
#include "cpu/vec.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// The rows of one (entry, head): row r starts at base + r * row_bytes, its elements lie dim_bytes
// apart. Of pages, row r is row (first_row + r) % page_rows of page pages[(first_row + r) /
// page_rows], and page 0 starts at base.
struct Rows;
FLASHATTN_NOINLINE char* paged_row(const Rows& rows, std::int64_t r);

struct Rows {
  char* base = nullptr;
  std::ptrdiff_t row_bytes = 0;
  std::ptrdiff_t dim_bytes = 0;
  DType dtype = DType::kFloat32;
  const std::int64_t* pages = nullptr;
  std::ptrdiff_t page_bytes = 0;
  std::int64_t page_rows = 1;
  std::int64_t first_row = 0;

  FLASHATTN_INLINE char* row(std::int64_t r) const {
    if (pages != nullptr) return paged_row(*this, r);
    return base + r * row_bytes;
  }
  // Whether rows [begin, end) lie row_bytes apart.
  FLASHATTN_INLINE bool in_one_run(std::int64_t begin, std::int64_t end) const {
    return pages == nullptr || (first_row + begin) / page_rows == (first_row + end - 1) / page_rows;
  }
  FLASHATTN_INLINE std::ptrdiff_t item_bytes() const { return dtype == DType::kFloat32 ? 4 : 2; }
  FLASHATTN_INLINE bool contiguous_rows() const { return dim_bytes == item_bytes(); }
};

// Apart from row(), where its two divisions would weigh on calls without pages.
FLASHATTN_NOINLINE char* paged_row(const Rows& rows, std::int64_t r) {
  const std::int64_t at = rows.first_row + r;
  return rows.base + rows.pages[at / rows.page_rows] * rows.page_bytes +
         at % rows.page_rows * rows.row_bytes;
}

// to[i] = where row begin + i of pages starts, for i < count; rows past `last` repeat it. Steps
// through a page instead of dividing for every row.
static inline void list_paged_rows(const Rows& rows, std::int64_t begin, std::int64_t last,
                                   std::int64_t count, const char** to) {
  const std::int64_t at = rows.first_row + begin;
  const std::int64_t* page = rows.pages + at / rows.page_rows;
  std::int64_t in_page = at % rows.page_rows;
  const char* row = rows.base + *page * rows.page_bytes + in_page * rows.row_bytes;
  for (std::int64_t i = 0; i < count; ++i) {
    to[i] = row;
    if (begin + i >= last) continue;
    row += rows.row_bytes;
    if (++in_page < rows.page_rows) continue;
    in_page = 0;
    row = rows.base + *++page * rows.page_bytes;
  }
}

FLASHATTN_INLINE Rows rows_of(const RowTensor& tensor, DType dtype, std::int64_t batch,
                              std::int64_t head) {
  const std::ptrdiff_t item = dtype == DType::kFloat32 ? 4 : 2;
  Rows rows{.base = static_cast<char*>(tensor.data) + tensor.offset(batch, head) * item,
            .row_bytes = tensor.row_stride * item,
            .dim_bytes = tensor.dim_stride * item,
            .dtype = dtype};
  if (tensor.pages != nullptr) {
    const RowPlace& place = tensor.places[batch];
    rows.pages = tensor.pages + place.batch * tensor.pages_stride;
    rows.page_bytes = tensor.batch_stride * item;
    rows.page_rows = tensor.page_rows;
    rows.first_row = place.row;
  }
  return rows;
}

// kLanes contiguous elements as float32.
template <DType dtype>
FLASHATTN_INLINE Vec widen(const char* from) {
  if constexpr (dtype == DType::kFloat32) return load(from);
  if constexpr (dtype == DType::kFloat16) return widen_float16(from);
  return widen_bfloat16(from);
}

template <DType dtype>
FLASHATTN_INLINE void narrow(char* to, Vec x) {
  if constexpr (dtype == DType::kFloat32) {
    store(to, x);
  } else if constexpr (dtype == DType::kFloat16) {
    narrow_float16(to, x);
  } else {
    narrow_bfloat16(to, x);
  }
}

template <typename Item>
FLASHATTN_INLINE void copy_items(const char* from, std::ptrdiff_t from_bytes, char* to,
                                 std::ptrdiff_t to_bytes, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i, from += from_bytes, to += to_bytes) {
    __builtin_memcpy(to, from, sizeof(Item));
  }
}

template <DType dtype>
FLASHATTN_INLINE void copy_strided(const char* from, std::ptrdiff_t from_bytes, char* to,
                                   std::ptrdiff_t to_bytes, std::int64_t count) {
  if constexpr (dtype == DType::kFloat32) {
    copy_items<float>(from, from_bytes, to, to_bytes, count);
  } else {
    copy_items<std::uint16_t>(from, from_bytes, to, to_bytes, count);
  }
}

// to[0..dim) = the elements of one row as float32.
template <DType dtype>
static void widen_row(const char* from, std::ptrdiff_t dim_bytes, std::int64_t dim, float* to) {
  constexpr std::ptrdiff_t item = dtype == DType::kFloat32 ? 4 : 2;
  char chunk[kLanes * item];
  alignas(64) float values[kLanes];
  std::int64_t d = 0;
  if (dim_bytes == item) {
    for (; d + kLanes <= dim; d += kLanes) store(to + d, widen<dtype>(from + d * item));
  }
  for (; d < dim; d += kLanes) {
    const std::int64_t count = dim - d < kLanes ? dim - d : kLanes;
    __builtin_memset(chunk, 0, sizeof(chunk));
    copy_strided<dtype>(from + d * dim_bytes, dim_bytes, chunk, item, count);
    store(values, widen<dtype>(chunk));
    __builtin_memcpy(to + d, values, static_cast<std::size_t>(count) * sizeof(float));
  }
}

// The elements of one row = from[0..dim), each rounded once.
template <DType dtype>
static void narrow_row(const float* from, std::int64_t dim, char* to, std::ptrdiff_t dim_bytes) {
  constexpr std::ptrdiff_t item = dtype == DType::kFloat32 ? 4 : 2;
  char chunk[kLanes * item];
  alignas(64) float values[kLanes] = {};
  std::int64_t d = 0;
  if (dim_bytes == item) {
    for (; d + kLanes <= dim; d += kLanes) narrow<dtype>(to + d * item, load(from + d));
  }
  for (; d < dim; d += kLanes) {
    const std::int64_t count = dim - d < kLanes ? dim - d : kLanes;
    __builtin_memcpy(values, from + d, static_cast<std::size_t>(count) * sizeof(float));
    narrow<dtype>(chunk, load(values));
    copy_strided<dtype>(chunk, item, to + d * dim_bytes, dim_bytes, count);
  }
}

FLASHATTN_INLINE void read_row(const Rows& rows, std::int64_t r, std::int64_t dim, float* to) {
  switch (rows.dtype) {
    case DType::kFloat16:
      return widen_row<DType::kFloat16>(rows.row(r), rows.dim_bytes, dim, to);
    case DType::kBFloat16:
      return widen_row<DType::kBFloat16>(rows.row(r), rows.dim_bytes, dim, to);
    default:
      return widen_row<DType::kFloat32>(rows.row(r), rows.dim_bytes, dim, to);
  }
}

FLASHATTN_INLINE void write_row(const float* from, std::int64_t dim, const Rows& rows,
                                std::int64_t r) {
  switch (rows.dtype) {
    case DType::kFloat16:
      return narrow_row<DType::kFloat16>(from, dim, rows.row(r), rows.dim_bytes);
    case DType::kBFloat16:
      return narrow_row<DType::kBFloat16>(from, dim, rows.row(r), rows.dim_bytes);
    default:
      return narrow_row<DType::kFloat32>(from, dim, rows.row(r), rows.dim_bytes);
  }
}

// One row of 16-bit elements without conversion.
FLASHATTN_INLINE void read_row_bits16(const Rows& rows, std::int64_t r, std::int64_t dim,
                                      std::uint16_t* to) {
  const char* from = rows.row(r);
  if (rows.dim_bytes == 2) {
    __builtin_memcpy(to, from, static_cast<std::size_t>(dim) * 2);
  } else {
    copy_items<std::uint16_t>(from, rows.dim_bytes, reinterpret_cast<char*>(to), 2, dim);
  }
}

// Whether none of row[0..dim) is infinite or NaN: 0 * x stays 0 for the others.
FLASHATTN_INLINE bool all_finite(const float* row, std::int64_t dim) {
  Vec sum{};
  std::int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) sum += load(row + d) * 0.0F;
  float tail = 0.0F;
  for (; d < dim; ++d) tail += row[d] * 0.0F;
  return tail == 0.0F && !any(sum != Vec{});
}

// The same for bf16 bit patterns: an exponent of all ones is not finite.
FLASHATTN_INLINE bool all_finite_bf16(const std::uint16_t* row, std::int64_t dim) {
  VecHalf found{};
  std::int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    const VecHalf bits = *reinterpret_cast<const VecHalfInMemory*>(row + d);
    found |= reinterpret_cast<VecHalf>((bits & 0x7f80) == 0x7f80);
  }
  std::int32_t tail = 0;
  for (; d < dim; ++d) tail |= (row[d] & 0x7f80) == 0x7f80;
  return tail == 0 && !any(__builtin_convertvector(found, VecI) != VecI{});
}

// Touches the cache lines of `count` rows ahead of their use.
FLASHATTN_INLINE void prefetch_rows(const Rows& rows, std::int64_t first, std::int64_t count,
                                    std::int64_t dim) {
  // Rows past the last, which a hint may name, have no page.
  if (!rows.contiguous_rows() || rows.pages != nullptr) return;
  const std::int64_t bytes = dim * rows.item_bytes();
  for (std::int64_t r = first; r < first + count; ++r) {
    for (std::int64_t offset = 0; offset < bytes; offset += 64)
      __builtin_prefetch(rows.row(r) + offset, 0, 2);
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
