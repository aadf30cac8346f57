// Sizes and copies of strided views; see strided_copy.h.
#include "metal/strided_copy.h"

#include <cassert>
#include <cstdint>
#include <cstring>

namespace flashattn::metal {

namespace {

std::size_t axis(int i) { return static_cast<std::size_t>(i); }

std::byte* at(std::byte* base, std::int64_t elements, std::size_t item) {
  return base + elements * static_cast<std::int64_t>(item);
}

// Copies axes `first`.. of one slice.
void copy_axes(std::byte* destination, const TensorView& to, std::byte* source,
               const TensorView& from, int first) {
  const std::size_t item = item_size(to.dtype);
  const std::int64_t count = to.shape[axis(first)];
  const std::int64_t to_stride = to.stride[axis(first)];
  const std::int64_t from_stride = from.stride[axis(first)];
  if (first + 1 < to.rank) {
    for (std::int64_t i = 0; i < count; ++i) {
      copy_axes(at(destination, i * to_stride, item), to, at(source, i * from_stride, item), from,
                first + 1);
    }
  } else if (to_stride == 1 && from_stride == 1) {
    std::memcpy(destination, source, static_cast<std::size_t>(count) * item);
  } else {
    for (std::int64_t i = 0; i < count; ++i) {
      std::memcpy(at(destination, i * to_stride, item), at(source, i * from_stride, item), item);
    }
  }
}

}  // namespace

ByteRange touched_bytes(const TensorView& view) {
  std::int64_t lowest = 0;
  std::int64_t highest = 0;
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[axis(i)] == 0) return {};
    const std::int64_t reach = (view.shape[axis(i)] - 1) * view.stride[axis(i)];
    (reach < 0 ? lowest : highest) += reach;
  }
  const auto item = static_cast<std::int64_t>(item_size(view.dtype));
  return {.before = static_cast<std::size_t>(-lowest * item),
          .after = static_cast<std::size_t>((highest + 1) * item)};
}

std::size_t byte_count(const TensorView& view) {
  std::size_t bytes = item_size(view.dtype);
  for (int i = 0; i < view.rank; ++i) bytes *= static_cast<std::size_t>(view.shape[axis(i)]);
  return bytes;
}

TensorView contiguous_like(const TensorView& view, void* data) {
  TensorView made{.data = data, .dtype = view.dtype, .rank = view.rank, .shape = view.shape};
  std::int64_t step = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    made.stride[axis(i)] = step;
    step *= view.shape[axis(i)];
  }
  return made;
}

void strided_copy(const TensorView& destination, const TensorView& source) {
  assert(destination.rank == source.rank && destination.shape == source.shape);
  assert(destination.dtype == source.dtype);
  if (byte_count(source) == 0) return;
  copy_axes(static_cast<std::byte*>(destination.data), destination,
            static_cast<std::byte*>(source.data), source, 0);
}

void strided_zero(const TensorView& view) {
  // One zero element seen through strides of 0.
  std::int64_t zero = 0;
  TensorView zeros = view;
  zeros.data = &zero;
  zeros.stride = {};
  strided_copy(view, zeros);
}

}  // namespace flashattn::metal
