// The integers of one call that say where and how long its entries are, read exactly once: what is
// validated is what is used, even when another thread writes to the caller's arrays in the
// meantime.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "flashattn/attention.h"

namespace flashattn {

// Points the integer arrays of `inputs` (q_offsets, kv_lengths, cu_seqlens, ...) at int64 copies of
// their values, which live as long as this object. A view that make_problem will refuse stays as it
// is.
class PerBatchValues {
 public:
  explicit PerBatchValues(AttentionInputs& inputs);
  ~PerBatchValues();
  PerBatchValues(const PerBatchValues&) = delete;
  PerBatchValues& operator=(const PerBatchValues&) = delete;

 private:
  using Values = std::array<std::vector<std::int64_t>, 7>;  // one of each array
  struct Spare;

  static Spare& spare();

  Values values_;
};

}  // namespace flashattn
