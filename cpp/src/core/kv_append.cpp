// Strided copies and rotations of rows; see kv_append.h.
#include "core/kv_append.h"

#include <cstring>

#include "core/half.h"

namespace flashattn {

namespace {

float read_float(const char* item, DType dtype) {
  if (dtype == DType::kFloat32 || dtype == DType::kFloat64) {
    float single = 0.0F;
    double wide = 0.0;
    if (dtype == DType::kFloat32) {
      std::memcpy(&single, item, sizeof single);
    } else {
      std::memcpy(&wide, item, sizeof wide);
      single = static_cast<float>(wide);
    }
    return single;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, item, sizeof bits);
  return dtype == DType::kFloat16 ? float16_to_float(bits) : bfloat16_to_float(bits);
}

void write_float(char* item, DType dtype, float value) {
  if (dtype == DType::kFloat32) {
    std::memcpy(item, &value, sizeof value);
    return;
  }
  const std::uint16_t bits =
      dtype == DType::kFloat16 ? float_to_float16(value) : float_to_bfloat16(value);
  std::memcpy(item, &bits, sizeof bits);
}

// One row of one head: `dim` items, stride_bytes apart.
struct Row {
  char* data = nullptr;
  std::ptrdiff_t stride_bytes = 0;

  char* item(std::int64_t d) const { return data + d * stride_bytes; }
};

// (batch, row, head, dim)
Row row_at(const TensorView& view, std::int64_t batch, std::int64_t row, std::int64_t head) {
  const auto item = static_cast<std::ptrdiff_t>(item_size(view.dtype));
  const std::int64_t at = batch * view.stride[0] + row * view.stride[1] + head * view.stride[2];
  return {.data = static_cast<char*>(view.data) + at * item, .stride_bytes = view.stride[3] * item};
}

void copy_row(const Row& to, const Row& from, std::int64_t dim, std::size_t item) {
  const auto dense = static_cast<std::ptrdiff_t>(item);
  if (to.stride_bytes == dense && from.stride_bytes == dense) {
    std::memcpy(to.data, from.data, static_cast<std::size_t>(dim) * item);
    return;
  }
  for (std::int64_t d = 0; d < dim; ++d) std::memcpy(to.item(d), from.item(d), item);
}

float table_value(const TensorView& table, std::int64_t position, std::int64_t pair) {
  const auto item = static_cast<std::ptrdiff_t>(item_size(table.dtype));
  const std::int64_t at = position * table.stride[0] + pair * table.stride[1];
  return read_float(static_cast<const char*>(table.data) + at * item, table.dtype);
}

// Turns the first 2 * pairs dimensions and rounds them to float32, then to the dtype; the rest is
// copied. In double the products are exact, so that no compiler's fused operations show.
void rotate_row(const Row& to, const Row& from, const TensorView& rows, std::int64_t position,
                const Rotary& rotary) {
  copy_row(to, from, rows.shape[3], item_size(rows.dtype));
  const std::int64_t pairs = rotary.cos.shape[1];
  for (std::int64_t p = 0; p < pairs; ++p) {
    const std::int64_t first = rotary.interleaved ? 2 * p : p;
    const std::int64_t second = rotary.interleaved ? 2 * p + 1 : p + pairs;
    const double x = read_float(from.item(first), rows.dtype);
    const double y = read_float(from.item(second), rows.dtype);
    const double cos = table_value(rotary.cos, position, p);
    const double sin = table_value(rotary.sin, position, p);
    write_float(to.item(first), rows.dtype, static_cast<float>(x * cos - y * sin));
    write_float(to.item(second), rows.dtype, static_cast<float>(x * sin + y * cos));
  }
}

}  // namespace

void append_rows(const TensorView& cache, const TensorView& rows,
                 const std::vector<AppendPlace>& places, std::int64_t page_size,
                 const Rotary& rotary) {
  for (std::int64_t b = 0; b < rows.shape[0]; ++b) {
    const AppendPlace& place = places[static_cast<std::size_t>(b)];
    for (std::int64_t t = 0; t < rows.shape[1]; ++t) {
      std::int64_t row = place.first.row + t;
      std::int64_t batch = place.first.batch;
      if (place.pages != nullptr) {
        batch = place.pages[row / page_size];
        row %= page_size;
      }
      for (std::int64_t h = 0; h < rows.shape[2]; ++h) {
        const Row to = row_at(cache, batch, row, h);
        const Row from = row_at(rows, b, t, h);
        if (rotary.cos) {
          rotate_row(to, from, rows, place.position + t, rotary);
        } else {
          copy_row(to, from, rows.shape[3], item_size(rows.dtype));
        }
      }
    }
  }
}

void rotate_rows(const TensorView& to, const TensorView& rows,
                 const std::vector<AppendPlace>& places, bool advances, const Rotary& rotary) {
  for (std::int64_t b = 0; b < rows.shape[0]; ++b) {
    const std::int64_t position = places[static_cast<std::size_t>(b)].position;
    for (std::int64_t i = 0; i < rows.shape[1]; ++i) {
      for (std::int64_t h = 0; h < rows.shape[2]; ++h) {
        rotate_row(row_at(to, b, i, h), row_at(rows, b, i, h), rows,
                   advances ? position + i : position, rotary);
      }
    }
  }
}

}  // namespace flashattn
