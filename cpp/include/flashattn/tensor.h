// TensorView: a non-owning strided view of up to four axes, the only array type of the library.
// It relies on nothing but the standard library and owns nothing: the caller keeps the memory
// alive.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace flashattn {

enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64, kBool, kInt32, kInt64 };

enum class DeviceKind : std::uint8_t { kCpu, kMetal };

// Bytes of one element.
constexpr std::size_t item_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kBool:
      return 1;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
  }
  return 0;
}

// "float32", "bfloat16", ...: the names that numpy and torch use.
constexpr std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat64:
      return "float64";
    case DType::kBool:
      return "bool";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
  }
  return "?";
}

// rank == 0 means "no such tensor"; every optional argument is passed that way.
struct TensorView {
  // Host memory: the address of element [0,0,0,0]. Metal: unused, see handle.
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int rank = 0;
  std::array<std::int64_t, 4> shape{};
  // In elements; zero and negative strides are allowed, and a stride on an axis of size 1 means
  // nothing.
  std::array<std::int64_t, 4> stride{};
  DeviceKind device = DeviceKind::kCpu;
  // Metal: the MTLBuffer that holds the tensor, whose first element lies byte_offset bytes in.
  void* handle = nullptr;
  std::int64_t byte_offset = 0;
  // The memory is a copy made for this call, because the caller's own could not be read in place:
  // the backend that runs counts its bytes as copied.
  bool copied = false;

  explicit operator bool() const { return rank != 0; }
};

// A row-major view of contiguous host memory.
template <typename... Sizes>
TensorView contiguous_view(void* data, DType dtype, Sizes... sizes) {
  static_assert(sizeof...(sizes) >= 1 && sizeof...(sizes) <= 4, "a view has one to four axes");
  TensorView view{.data = data, .dtype = dtype, .rank = static_cast<int>(sizeof...(sizes))};
  int axis = 0;
  ((view.shape[static_cast<std::size_t>(axis++)] = static_cast<std::int64_t>(sizes)), ...);
  std::int64_t step = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.stride[static_cast<std::size_t>(i)] = step;
    step *= view.shape[static_cast<std::size_t>(i)];
  }
  return view;
}

}  // namespace flashattn
