// The per-batch integers of one call, read exactly once: what is validated is what is used, even
// when another thread writes to the caller's arrays in the meantime.
#pragma once

#include <cstdint>
#include <vector>

#include "flashattn/attention.h"

namespace flashattn {

// Points inputs.q_offsets and inputs.kv_lengths at copies of their values, which live as long as
// this object. A view that make_problem will refuse stays as it is.
class PerBatchValues {
 public:
  explicit PerBatchValues(AttentionInputs& inputs);
  PerBatchValues(const PerBatchValues&) = delete;
  PerBatchValues& operator=(const PerBatchValues&) = delete;

 private:
  std::vector<std::int64_t> q_offsets_;   // [batch]
  std::vector<std::int64_t> kv_lengths_;  // [batch]
};

}  // namespace flashattn
