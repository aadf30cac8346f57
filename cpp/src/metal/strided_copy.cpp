// Sizes and copies of strided views; see strided_copy.h.
#include "metal/strided_copy.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace flashattn::metal {

namespace {

std::size_t axis(int i) { return static_cast<std::size_t>(i); }

// One axis of two views: addresses of the first elements and steps in bytes.
struct Run {
  std::byte* to;
  std::ptrdiff_t to_step;
  const std::byte* from;
  std::ptrdiff_t from_step;
  std::int64_t count;
};

std::ptrdiff_t step_of(const TensorView& view, int i) {
  return view.stride[axis(i)] * static_cast<std::ptrdiff_t>(item_size(view.dtype));
}

// Calls `copy` with the last axis of every slice.
template <typename Copy>
void for_each_run(std::byte* destination, const TensorView& to, const std::byte* source,
                  const TensorView& from, int first, Copy&& copy) {
  const Run run{.to = destination,
                .to_step = step_of(to, first),
                .from = source,
                .from_step = step_of(from, first),
                .count = to.shape[axis(first)]};
  if (first + 1 == to.rank) {
    copy(run);
    return;
  }
  for (std::int64_t i = 0; i < run.count; ++i) {
    for_each_run(run.to + i * run.to_step, to, run.from + i * run.from_step, from, first + 1, copy);
  }
}

template <typename Copy>
void copy_view(const TensorView& destination, const TensorView& source, Copy&& copy) {
  assert(destination.rank == source.rank && destination.shape == source.shape);
  if (byte_count(source) == 0) return;
  for_each_run(static_cast<std::byte*>(destination.data), destination,
               static_cast<const std::byte*>(source.data), source, 0, copy);
}

template <typename To, typename From, typename Convert>
void copy_converted(const TensorView& destination, const TensorView& source, Convert&& convert) {
  copy_view(destination, source, [&](const Run& run) {
    for (std::int64_t i = 0; i < run.count; ++i) {
      From from;
      std::memcpy(&from, run.from + i * run.from_step, sizeof from);
      const To to = convert(from);
      std::memcpy(run.to + i * run.to_step, &to, sizeof to);
    }
  });
}

float narrowed(double value) {
  constexpr auto kMost = static_cast<double>(std::numeric_limits<float>::max());
  return static_cast<float>(std::isfinite(value) ? std::clamp(value, -kMost, kMost) : value);
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
  assert(destination.dtype == source.dtype);
  const std::size_t item = item_size(source.dtype);
  const auto packed = static_cast<std::ptrdiff_t>(item);
  copy_view(destination, source, [=](const Run& run) {
    if (run.to_step == packed && run.from_step == packed) {
      std::memcpy(run.to, run.from, static_cast<std::size_t>(run.count) * item);
      return;
    }
    for (std::int64_t i = 0; i < run.count; ++i) {
      std::memcpy(run.to + i * run.to_step, run.from + i * run.from_step, item);
    }
  });
}

void copy_narrowed(const TensorView& destination, const TensorView& source) {
  assert(destination.dtype == DType::kFloat32 && source.dtype == DType::kFloat64);
  copy_converted<float, double>(destination, source, narrowed);
}

void copy_widened(const TensorView& destination, const TensorView& source) {
  assert(destination.dtype == DType::kFloat64 && source.dtype == DType::kFloat32);
  copy_converted<double, float>(destination, source, [](float x) { return double{x}; });
}

namespace {

// One element seen through strides of 0.
void fill(const TensorView& view, void* element) {
  TensorView repeated = view;
  repeated.data = element;
  repeated.stride = {};
  strided_copy(view, repeated);
}

}  // namespace

void strided_zero(const TensorView& view) {
  std::int64_t zero = 0;
  fill(view, &zero);
}

void strided_fill(const TensorView& view, float value) { fill(view, &value); }

}  // namespace flashattn::metal
