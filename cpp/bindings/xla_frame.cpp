// Reading call frames; see xla_frame.h.
#include "xla_frame.h"

#include <algorithm>

#include "flashattn/error.h"

namespace flashattn::xla {

namespace {

DType dtype_of(std::string_view name, ElementType type) {
  switch (type) {
    case ElementType::kBool:
      return DType::kBool;
    case ElementType::kInt32:
      return DType::kInt32;
    case ElementType::kInt64:
      return DType::kInt64;
    case ElementType::kFloat16:
      return DType::kFloat16;
    case ElementType::kFloat32:
      return DType::kFloat32;
    case ElementType::kFloat64:
      return DType::kFloat64;
    case ElementType::kBFloat16:
      return DType::kBFloat16;
    case ElementType::kUInt32:
      break;
  }
  throw InvalidType("attention: " + std::string(name) + ".dtype (XLA type " +
                    std::to_string(static_cast<std::uint32_t>(type)) +
                    ") must be a dtype that attention can read");
}

}  // namespace

const void* FrameAttributes::find(std::string_view name, AttributeKind kind) const {
  for (std::int64_t i = 0; i < attributes_.count; ++i) {
    const Text& found = *attributes_.names[i];
    if (std::string_view(found.data, found.size) != name) continue;
    if (attributes_.kinds[i] == kind) return attributes_.values[i];
    throw InvalidType("attention: attribute " + std::string(name) + " has another kind");
  }
  return nullptr;
}

std::string_view FrameAttributes::text(std::string_view name) const {
  const auto* found = static_cast<const Text*>(find(name, AttributeKind::kText));
  return found == nullptr ? std::string_view() : std::string_view(found->data, found->size);
}

std::optional<double> FrameAttributes::real(std::string_view name) const {
  const auto* found = static_cast<const Scalar*>(find(name, AttributeKind::kScalar));
  if (found == nullptr) return std::nullopt;
  if (found->type != ElementType::kFloat64) {
    throw InvalidType("attention: attribute " + std::string(name) + " must be float64");
  }
  return *static_cast<const double*>(found->value);
}

std::int64_t FrameAttributes::integer(std::string_view name, std::int64_t otherwise) const {
  const auto* found = static_cast<const Scalar*>(find(name, AttributeKind::kScalar));
  if (found == nullptr) return otherwise;
  if (found->type != ElementType::kInt64) {
    throw InvalidType("attention: attribute " + std::string(name) + " must be int64");
  }
  return *static_cast<const std::int64_t*>(found->value);
}

NamedBuffers::NamedBuffers(const Values& values, std::string_view names) {
  std::int64_t index = 0;
  for (std::size_t start = 0; start < names.size(); ++index) {
    const std::size_t end = std::min(names.find(' ', start), names.size());
    if (index < values.count) {
      if (values.kinds[index] != ValueKind::kBuffer) {
        throw InvalidType("attention: operands and results must be buffers");
      }
      buffers_.emplace_back(names.substr(start, end - start),
                            static_cast<const Buffer*>(values.values[index]));
    }
    start = end + 1;
  }
  if (index != values.count) {
    throw InvalidArgument("attention: " + std::to_string(values.count) + " buffers must be " +
                          std::string(names));
  }
}

const Buffer* NamedBuffers::find(std::string_view name) const {
  for (const auto& [other, buffer] : buffers_) {
    if (other == name) return buffer;
  }
  return nullptr;
}

void NamedBuffers::check_lead(const std::vector<std::int64_t>& sizes, bool shared) const {
  for (const auto& [name, buffer] : buffers_) {
    bool fits = buffer->rank >= static_cast<std::int64_t>(sizes.size());
    for (std::size_t axis = 0; fits && axis < sizes.size(); ++axis) {
      const std::int64_t size = buffer->sizes[axis];
      fits = size == sizes[axis] || (shared && size == 1);
    }
    if (!fits) {
      throw InvalidArgument("attention: " + std::string(name) + ".shape must begin as query's");
    }
  }
}

TensorView NamedBuffers::view(std::string_view name,
                              const std::vector<std::int64_t>& example) const {
  const Buffer* buffer = find(name);
  if (buffer == nullptr) return {};
  const auto lead = static_cast<std::int64_t>(example.size());
  const std::int64_t rank = buffer->rank - lead;
  if (rank < 1 || rank > 4) {
    throw InvalidArgument("attention: " + std::string(name) + ".ndim (" + std::to_string(rank) +
                          ") must be 1 to 4");
  }
  TensorView view{.dtype = dtype_of(name, buffer->type), .rank = static_cast<int>(rank)};
  std::int64_t step = 1;
  std::int64_t offset = 0;
  for (std::int64_t axis = buffer->rank - 1; axis >= 0; --axis) {
    const std::int64_t size = buffer->sizes[axis];
    if (axis >= lead) {
      view.shape[static_cast<std::size_t>(axis - lead)] = size;
      view.stride[static_cast<std::size_t>(axis - lead)] = step;
    } else if (size != 1) {
      offset += example[static_cast<std::size_t>(axis)] * step;
    }
    step *= size;
  }
  view.data =
      static_cast<char*>(buffer->data) + offset * static_cast<std::int64_t>(item_size(view.dtype));
  return view;
}

}  // namespace flashattn::xla
