// flashattn's C++ API: exact attention, forward and backward, over strided views.
//
//   flashattn::forward({.inputs = {.query = q, .key = k, .value = v}, .out = o, .lse = l},
//                      {.causal = flashattn::Causal::kBottomRight});
//
// Shapes: query (batch, seqlen_q, query_heads, head_dim), key (batch, seqlen_k, kv_heads,
// head_dim), value (batch, seqlen_k, kv_heads, value_dim), out (batch, seqlen_q, query_heads,
// value_dim), lse (batch, query_heads, seqlen_q) float32. Another layout is the same view with
// permuted strides. Outputs are overwritten. The rules every backend keeps are in docs/math.md.
//
// Packed sequences (cu_seqlens given) have no batch axis: query (total_q, query_heads, head_dim),
// key (total_k, kv_heads, head_dim), lse (query_heads, total_q). Pages (block_table given): key and
// value are (num_pages, page_size, kv_heads, dim).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "flashattn/error.h"
#include "flashattn/tensor.h"

namespace flashattn {

enum class Causal : std::uint8_t {
  kNone,
  kBottomRight,  // the last query row sees the last key: j <= i + seqlen_k - seqlen_q
  kTopLeft,      // row i sees keys 0..i, whatever the lengths
};

// pos(i) - left <= j <= pos(i) + right, both inclusive; -1 is unlimited on that side.
struct Window {
  std::int64_t left = -1;
  std::int64_t right = -1;
  bool operator==(const Window&) const = default;
};

// Where this call's scores lie in the global (heads x queries x keys) numbering of dropout.
struct DropoutShard {
  std::int64_t global_heads = 0;
  std::int64_t head_start = 0;
  std::int64_t global_queries = 0;
  std::int64_t query_start = 0;
  std::int64_t global_keys = 0;
  std::int64_t key_start = 0;
  bool operator==(const DropoutShard&) const = default;
};

// Philox4x32-10 dropout on the probabilities; probability 0 is bitwise the call without dropout.
struct Dropout {
  double probability = 0.0;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  std::optional<DropoutShard> shard{};
  bool operator==(const Dropout&) const = default;
};

// Every member below has an initialiser, so that designated initialisers may leave any out without
// a warning.

// Everything that is not an array. The defaults are plain attention.
struct AttentionOptions {
  std::optional<float> scale{};  // default head_dim^-1/2; zero and negative are allowed
  Causal causal = Causal::kNone;
  Window window{};
  float softcap = 0.0F;  // 0 is off
  Dropout dropout{};
  // Global position of row 0 / key 0; without q_offset rows are aligned as `causal` says.
  std::optional<std::int64_t> q_offset{};
  std::int64_t k_offset = 0;
  std::string backend{};  // empty: the first backend that supports the problem
};

// The arrays that go in. All but the first three are optional (rank 0 when absent).
struct AttentionInputs {
  TensorView query{};
  TensorView key{};
  TensorView value{};
  TensorView mask{};  // bool or floating, broadcastable to (batch, query_heads, seqlen_q, seqlen_k)
  TensorView alibi_slopes{};  // float32 (query_heads) or (batch, query_heads)
  TensorView sinks{};         // float32 (query_heads): one extra logit per head
  TensorView q_offsets{};     // int32 or int64 (batch): AttentionOptions::q_offset per batch entry
  TensorView kv_lengths{};    // int32 or int64 (batch): keys at and past the length do not exist
  // Sequence b of a packed call is query rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]), which see key
  // rows [cu_seqlens_k[b], cu_seqlens_k[b + 1]); both are int32 or int64 (batch + 1), rise and
  // start at 0. Rows past the last give out 0, lse -inf and gradients 0.
  TensorView cu_seqlens_q{};
  TensorView cu_seqlens_k{};
  // int32 or int64 (batch, max_pages): row r of entry b's keys lies in page block_table[b][r /
  // page_size]. Numbers past an entry's last key are not read.
  TensorView block_table{};
  // int32 or int64 (batch): rows of key before the start do not exist; positions count from it.
  TensorView kv_starts{};
  // int32 or int64 (batch): the index on key's and value's batch axis that entry b attends to.
  TensorView kv_batch_index{};
  // The integers from q_offsets on lie in host memory, wherever the other arrays are; they are read
  // once, at the start.
};

struct ForwardTensors {
  AttentionInputs inputs{};
  TensorView out{};
  TensorView lse{};  // natural log; -inf for a row that sees no key
};

struct BackwardTensors {
  AttentionInputs inputs{};
  TensorView out{};
  TensorView lse{};
  TensorView dout{};
  TensorView dlse{};  // optional: the gradient of lse
  TensorView dq{};
  TensorView dk{};
  TensorView dv{};
  TensorView dmask{};          // needed when its input is given and its gradient is wanted
  TensorView dalibi_slopes{};  // likewise
  TensorView dsinks{};         // likewise
};

// Writes out and lse. Throws InvalidArgument, InvalidType, Unsupported or DeviceError (error.h).
void forward(const ForwardTensors& tensors, const AttentionOptions& options = {});

// Writes every gradient whose view is given. out and lse are forward's, for the same options.
void backward(const BackwardTensors& tensors, const AttentionOptions& options = {});

}  // namespace flashattn
