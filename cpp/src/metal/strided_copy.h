// Sizes and copies of strided views in host memory. Plain C++20, tested on every machine.
#pragma once

#include <cstddef>

#include "flashattn/tensor.h"

namespace flashattn::metal {

// Bytes that a view touches, relative to the address of element [0,0,0,0]; negative strides reach
// before it.
struct ByteRange {
  std::size_t before = 0;
  std::size_t after = 0;  // one past the last byte
};
ByteRange touched_bytes(const TensorView& view);

// Elements times item size: what a copy of the view takes.
std::size_t byte_count(const TensorView& view);

// A row-major view of the same shape and dtype over host memory at `data`.
TensorView contiguous_like(const TensorView& view, void* data);

// Copies every element; shapes and dtypes are equal, alignment does not matter.
void strided_copy(const TensorView& destination, const TensorView& source);

// The same from float64 to float32 and back. A finite value stays finite: what float32 cannot hold
// becomes its largest.
void copy_narrowed(const TensorView& destination, const TensorView& source);
void copy_widened(const TensorView& destination, const TensorView& source);

// Writes zero to every element.
void strided_zero(const TensorView& view);

// Writes `value` to every element of a float32 view.
void strided_fill(const TensorView& view, float value);

}  // namespace flashattn::metal
