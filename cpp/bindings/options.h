// _core.Options and what the calls make of it: AttentionOptions, and the arrays that every call
// reads as views in the library's (batch, seqlen, heads, dim) order. Shapes, dtypes and values are
// checked by make_problem, not here.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "flashattn/attention.h"
#include "ndarray.h"

namespace flashattn::python {

struct FunctionNames {
  const char* forward;
  const char* backward;
};
inline constexpr FunctionNames kAttention = {"attention", "attention_backward"};
inline constexpr FunctionNames kVarlen = {"attention_varlen", "attention_varlen_backward"};

// The options under their public names. Arrays are imported at each call.
struct Options {
  std::optional<float> scale;
  Causal causal = Causal::kNone;
  std::array<std::int64_t, 2> window = {-1, -1};  // left, right
  float softcap = 0.0F;
  double dropout_p = 0.0;
  std::uint64_t dropout_seed = 0;
  std::uint64_t dropout_offset = 0;
  std::optional<std::array<std::int64_t, 6>> dropout_shard;  // in DropoutShard's order
  std::optional<std::int64_t> q_offset;
  std::int64_t k_offset = 0;
  std::string backend;
  bool heads_first = false;  // layout="bhsd"
  nb::object mask = nb::none();
  nb::object alibi_slopes = nb::none();
  nb::object sinks = nb::none();
  nb::object q_offsets = nb::none();
  nb::object kv_lengths = nb::none();
  nb::object cu_seqlens_q = nb::none();
  nb::object cu_seqlens_k = nb::none();
  nb::object block_table = nb::none();

  const FunctionNames& names() const { return cu_seqlens_q.is_none() ? kAttention : kVarlen; }
};

AttentionOptions attention_options(const Options& options);

// The array's view with seqlen before heads.
TensorView bshd(const ArrayArgument& array, const Options& options);

// The arrays every call reads, imported once and held until the call is over.
struct InputArrays {
  InputArrays(const char* function, nb::handle query_array, nb::handle key_array,
              nb::handle value_array, const Options& options);

  AttentionInputs views(const Options& options) const;

  ArrayArgument query, key, value, mask, alibi_slopes, sinks, q_offsets, kv_lengths;
  ArrayArgument cu_seqlens_q, cu_seqlens_k, block_table;
};

void bind_options(nb::module_& module);

}  // namespace flashattn::python
