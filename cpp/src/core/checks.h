// The sentences of validation: one function per kind of complaint, so that every message names the
// function, the argument, what it got and what it expected. What is required of which argument is
// problem.cpp's.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "flashattn/problem.h"
#include "flashattn/tensor.h"

namespace flashattn {

// An argument as messages call it.
struct NamedView {
  const char* name;  // "key"
  const TensorView& view;
};

class Checks {
 public:
  // `function` opens every message, with "_backward" behind it in that pass.
  Checks(std::string_view function, Pass pass)
      : function_(function), pass_(pass), is_cache_(function == "attention_kvcache") {}

  // What the function calls its arrays of keys and values.
  const char* key() const { return is_cache_ ? "k_cache" : "key"; }
  const char* value() const { return is_cache_ ? "v_cache" : "value"; }

  // "attention: NAME (GOT) must EXPECTED".
  [[noreturn]] void fail_value(const std::string& name, const std::string& got,
                               const std::string& expected) const;
  [[noreturn]] void fail_type(const std::string& name, const std::string& got,
                              const std::string& expected) const;
  [[noreturn]] void fail_unsupported(const std::string& name, const std::string& got,
                                     const std::string& expected) const;

  // "attention: key.head_dim (64) must equal query.head_dim (128)".
  void equal(const std::string& name, std::int64_t got, const std::string& expected_name,
             std::int64_t expected) const;
  void between(const std::string& name, std::int64_t got, std::int64_t low,
               std::int64_t high) const;

  void rank(const NamedView& arg, int expected) const;
  void dtype_equal(const NamedView& arg, const std::string& expected_name, DType expected) const;
  // The rank, and the sizes of that many axes.
  void shape(const NamedView& arg, const std::array<std::int64_t, 4>& expected, int rank) const;

  // Sizes are not negative, memory is there and aligned to its items, and lies on `device`.
  void memory(const NamedView& arg, DeviceKind device) const;
  // Additionally: no two indices share an element, so that writing has one meaning.
  void writable(const NamedView& arg, DeviceKind device) const;
  // No byte of the output belongs to the other view. Parts of one packed array, which lie in
  // different columns of its rows, are told apart; finer interleaving is refused.
  void distinct(const NamedView& output, const NamedView& other) const;

 private:
  std::string sentence(const std::string& name, const std::string& got,
                       const std::string& expected) const;

  std::string_view function_;
  Pass pass_;
  bool is_cache_;
};

// Validates the call of another public function than `attention`.
AttentionProblem make_problem(std::string_view function, const ForwardTensors& tensors,
                              const AttentionOptions& options);

// Validates a forward call that has no memory for its results yet.
AttentionProblem problem_of_inputs(const AttentionInputs& inputs, const AttentionOptions& options);

// problem.dropout, validated against the problem's sizes; none where its probability is 0.
void read_dropout(const Checks& check, const Dropout& dropout, AttentionProblem& problem);

// "(2, 128, 8, 64)".
std::string shape_text(const TensorView& view);
std::string shape_text(const std::array<std::int64_t, 4>& shape, int rank);

bool is_empty(const TensorView& view);

}  // namespace flashattn
