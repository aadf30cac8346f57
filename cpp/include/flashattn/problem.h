// AttentionProblem: what was asked, validated, without pointers. Backend choice, tuning, pipeline
// keys, log lines and test ids are functions of it. Only make_problem validates; after it code
// asserts.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "flashattn/attention.h"

namespace flashattn {

enum class Pass : std::uint8_t { kForward, kBackward };

enum class MaskKind : std::uint8_t { kNone, kBool, kAdditive };

struct AttentionProblem {
  std::string_view function = "attention";  // what was called; messages add "_backward"
  Pass pass = Pass::kForward;
  DType dtype = DType::kFloat32;
  DeviceKind device = DeviceKind::kCpu;
  std::int64_t batch = 0;  // entries: sequences of a packed call
  std::int64_t query_heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t seqlen_q = 0;  // of the longest entry
  std::int64_t seqlen_k = 0;  // likewise; of pages all that a row of the block table holds
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;
  float scale = 1.0F;

  Causal causal = Causal::kNone;
  Window window{};  // normalised: a side that cannot exclude anything is -1
  float softcap = 0.0F;
  Dropout dropout{};
  MaskKind mask = MaskKind::kNone;
  DType mask_dtype = DType::kBool;
  std::array<std::int64_t, 4> mask_shape{};  // as given, padded with leading ones
  bool mask_gradient = false;
  bool alibi = false;
  bool sinks = false;
  bool has_q_offset = false;  // one value for all, in q_offset, unless per_batch_q_offset
  bool per_batch_q_offset = false;
  std::int64_t q_offset = 0;
  std::int64_t k_offset = 0;
  bool kv_lengths = false;
  bool packed = false;         // sequences one behind the other
  std::int64_t total_q = 0;    // rows of query if it is packed
  std::int64_t total_k = 0;    // rows of key if it is packed, or of all pages
  std::int64_t page_size = 0;  // 0: keys are not paged
  bool kv_starts = false;
  bool kv_batch_index = false;

  bool operator==(const AttentionProblem&) const = default;

  std::int64_t heads_per_kv() const { return kv_heads == 0 ? 0 : query_heads / kv_heads; }
  // Whether entries differ in where their rows lie or in how many there are.
  bool ragged() const { return packed || page_size != 0 || kv_starts || kv_batch_index; }
};

// Validates shapes, dtypes, devices and options in one place, and names the argument, what it got
// and what it expected. Throws InvalidArgument or InvalidType.
AttentionProblem make_problem(const ForwardTensors& tensors, const AttentionOptions& options);
AttentionProblem make_problem(const BackwardTensors& tensors, const AttentionOptions& options);

// One line for logs and error messages, e.g.
// "backward float32 B=1 H=8/2 T=512 D=64 causal=bottom_right"; two sizes that agree are written
// once.
std::string to_string(const AttentionProblem& problem);

}  // namespace flashattn
