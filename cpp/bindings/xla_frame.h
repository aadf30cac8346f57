// What a handler reads out of an XLA call frame: attributes by name, and operands and results by
// name as TensorViews, one example of a vmapped call at a time. Checks that a frame has the form
// that flashattn/_jax.py gives it; shapes, dtypes and options belong to make_problem. Knows no
// Python: handlers run in XLA's threads, without the GIL.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flashattn/tensor.h"
#include "xla_abi.h"

namespace flashattn::xla {

class FrameAttributes {
 public:
  explicit FrameAttributes(const Attributes& attributes) : attributes_(attributes) {}

  std::string_view text(std::string_view name) const;  // "" where there is none
  std::optional<double> real(std::string_view name) const;
  std::int64_t integer(std::string_view name, std::int64_t otherwise) const;

 private:
  const void* find(std::string_view name, AttributeKind kind) const;

  const Attributes& attributes_;
};

// Operands or results under the names that an attribute lists, separated by spaces.
class NamedBuffers {
 public:
  NamedBuffers(const Values& values, std::string_view names);

  const Buffer* find(std::string_view name) const;  // null where there is none
  // Throws unless each array has the axes of vmap in front: of these sizes, or where `shared` of 1.
  void check_lead(const std::vector<std::int64_t>& sizes, bool shared) const;
  // The array of one example, whose index has as many axes as check_lead was given.
  TensorView view(std::string_view name, const std::vector<std::int64_t>& example) const;

 private:
  std::vector<std::pair<std::string_view, const Buffer*>> buffers_;
};

}  // namespace flashattn::xla
