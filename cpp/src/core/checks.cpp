// The sentences of validation; see checks.h.
#include "core/checks.h"

#include <algorithm>

#include "flashattn/error.h"

namespace flashattn {

namespace {

const char* device_name(DeviceKind device) {
  return device == DeviceKind::kMetal ? "metal" : "cpu";
}

// Whether two different indices can reach one element. Axes are taken from the smallest stride up:
// if each stride steps over everything the smaller ones span, no two meet. Layouts that interleave
// without meeting and fail this rule are refused too; no framework makes them.
bool may_overlap_itself(const TensorView& view) {
  struct Axis {
    std::int64_t size;
    std::int64_t stride;
  };
  std::array<Axis, 4> axes{};
  std::size_t count = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(view.rank); ++i) {
    if (view.shape[i] <= 1) continue;
    const std::int64_t stride = view.stride[i];
    axes[count++] = {.size = view.shape[i], .stride = stride < 0 ? -stride : stride};
  }
  std::sort(axes.begin(), axes.begin() + static_cast<std::ptrdiff_t>(count),
            [](const Axis& a, const Axis& b) { return a.stride < b.stride; });
  std::int64_t span = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (axes[i].stride <= span) return true;
    span += (axes[i].size - 1) * axes[i].stride;
  }
  return false;
}

// Half-open, in bytes: from the start of the address space, or of the view's MTLBuffer.
struct ByteRange {
  std::intptr_t begin;
  std::intptr_t end;
};

// What the view touches along the axes that `counts(stride in bytes)` picks.
template <typename Counts>
ByteRange touched_bytes(const TensorView& view, const Counts& counts) {
  const auto item = static_cast<std::int64_t>(item_size(view.dtype));
  const std::intptr_t first = view.device == DeviceKind::kMetal
                                  ? static_cast<std::intptr_t>(view.byte_offset)
                                  : reinterpret_cast<std::intptr_t>(view.data);
  ByteRange range{.begin = first, .end = first + item};
  for (std::size_t i = 0; i < static_cast<std::size_t>(view.rank); ++i) {
    const std::int64_t stride = view.stride[i] * item;
    if (view.shape[i] <= 1 || !counts(stride)) continue;
    const std::int64_t reach = (view.shape[i] - 1) * stride;
    (reach < 0 ? range.begin : range.end) += reach;
  }
  return range;
}

// Whether the two stay in different columns of rows that are `period` bytes long.
bool in_different_columns(const TensorView& a, const TensorView& b, std::int64_t period) {
  const auto within_row = [&](std::int64_t stride) { return stride % period != 0; };
  const ByteRange one = touched_bytes(a, within_row);
  const ByteRange other = touched_bytes(b, within_row);
  std::intptr_t gap = (other.begin - one.begin) % period;
  if (gap < 0) gap += period;
  return gap >= one.end - one.begin && gap + (other.end - other.begin) <= period;
}

// Whether the two can share a byte. Neither is empty.
bool may_overlap(const TensorView& a, const TensorView& b) {
  if (a.device != b.device) return false;
  if (a.device == DeviceKind::kMetal && a.handle != b.handle) return false;
  const auto every = [](std::int64_t) { return true; };
  const ByteRange one = touched_bytes(a, every);
  const ByteRange other = touched_bytes(b, every);
  if (one.end <= other.begin || other.end <= one.begin) return false;
  const auto item = static_cast<std::int64_t>(item_size(a.dtype));
  for (std::size_t i = 0; i < static_cast<std::size_t>(a.rank); ++i) {
    const std::int64_t stride = a.stride[i] * item;
    const std::int64_t period = stride < 0 ? -stride : stride;
    if (a.shape[i] > 1 && period != 0 && in_different_columns(a, b, period)) return false;
  }
  return true;
}

}  // namespace

std::string shape_text(const std::array<std::int64_t, 4>& shape, int rank) {
  std::string text = "(";
  for (int i = 0; i < rank; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[static_cast<std::size_t>(i)]);
  }
  return text + (rank == 1 ? ",)" : ")");
}

std::string shape_text(const TensorView& view) { return shape_text(view.shape, view.rank); }

bool is_empty(const TensorView& view) {
  for (std::size_t i = 0; i < static_cast<std::size_t>(view.rank); ++i) {
    if (view.shape[i] == 0) return true;
  }
  return false;
}

void Checks::fail_value(const std::string& name, const std::string& got,
                        const std::string& expected) const {
  throw InvalidArgument(sentence(name, got, expected));
}

void Checks::fail_unsupported(const std::string& name, const std::string& got,
                              const std::string& expected) const {
  throw Unsupported(sentence(name, got, expected));
}

std::string Checks::sentence(const std::string& name, const std::string& got,
                             const std::string& expected) const {
  return std::string(function_) + (pass_ == Pass::kBackward ? "_backward: " : ": ") + name + " (" +
         got + ") must " + expected;
}

void Checks::fail_type(const std::string& name, const std::string& got,
                       const std::string& expected) const {
  throw InvalidType(sentence(name, got, expected));
}

void Checks::equal(const std::string& name, std::int64_t got, const std::string& expected_name,
                   std::int64_t expected) const {
  if (got == expected) return;
  fail_value(name, std::to_string(got),
             "equal " + expected_name + " (" + std::to_string(expected) + ")");
}

void Checks::between(const std::string& name, std::int64_t got, std::int64_t low,
                     std::int64_t high) const {
  if (low <= got && got <= high) return;
  fail_value(name, std::to_string(got),
             "be between " + std::to_string(low) + " and " + std::to_string(high));
}

void Checks::rank(const NamedView& arg, int expected) const {
  if (arg.view.rank == expected) return;
  fail_value(std::string(arg.name) + ".ndim", std::to_string(arg.view.rank),
             "be " + std::to_string(expected));
}

void Checks::dtype_equal(const NamedView& arg, const std::string& expected_name,
                         DType expected) const {
  if (arg.view.dtype == expected) return;
  const std::string want(dtype_name(expected));
  fail_type(std::string(arg.name) + ".dtype", std::string(dtype_name(arg.view.dtype)),
            expected_name.empty() ? "be " + want : "equal " + expected_name + " (" + want + ")");
}

void Checks::shape(const NamedView& arg, const std::array<std::int64_t, 4>& expected,
                   int rank) const {
  bool same = arg.view.rank == rank;
  for (std::size_t i = 0; same && i < static_cast<std::size_t>(rank); ++i) {
    same = arg.view.shape[i] == expected[i];
  }
  if (same) return;
  fail_value(std::string(arg.name) + ".shape", shape_text(arg.view),
             "be " + shape_text(expected, rank));
}

void Checks::memory(const NamedView& arg, DeviceKind device) const {
  const TensorView& view = arg.view;
  const std::string name = arg.name;
  for (std::size_t i = 0; i < static_cast<std::size_t>(view.rank); ++i) {
    if (view.shape[i] < 0) fail_value(name + ".shape", shape_text(view), "not be negative");
  }
  if (view.device != device) {
    fail_value(name + ".device", device_name(view.device),
               std::string("equal query.device (") + device_name(device) + ")");
  }
  if (is_empty(view)) return;
  const std::size_t item = item_size(view.dtype);
  if (device == DeviceKind::kMetal) {
    if (view.handle == nullptr) fail_value(name + ".handle", "null", "be a buffer");
    if (view.byte_offset < 0 || view.byte_offset % static_cast<std::int64_t>(item) != 0) {
      fail_value(name + ".byte_offset", std::to_string(view.byte_offset),
                 "be a multiple of " + std::to_string(item));
    }
    return;
  }
  if (view.data == nullptr) fail_value(name + ".data", "null", "point to memory");
  if (reinterpret_cast<std::uintptr_t>(view.data) % item != 0) {
    fail_value(name + ".data", "unaligned", "be aligned to " + std::to_string(item) + " bytes");
  }
}

void Checks::writable(const NamedView& arg, DeviceKind device) const {
  memory(arg, device);
  if (is_empty(arg.view) || !may_overlap_itself(arg.view)) return;
  const auto axes = arg.view.stride;
  fail_value(std::string(arg.name) + ".stride", shape_text(axes, arg.view.rank),
             "give every element of an output its own memory");
}

void Checks::distinct(const NamedView& output, const NamedView& other) const {
  if (!output.view || !other.view || is_empty(output.view) || is_empty(other.view)) return;
  if (may_overlap(output.view, other.view)) {
    fail_value(output.name, std::string("shares memory with ") + other.name,
               "not overlap another argument");
  }
}

}  // namespace flashattn
