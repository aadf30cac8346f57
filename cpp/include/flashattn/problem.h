// AttentionProblem: what was asked, validated, without pointers. Backend choice, tuning, pipeline
// keys, log lines and test ids are functions of it. Only make_problem validates; after it code
// asserts.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "flashattn/attention.h"

namespace flashattn {

enum class Pass : std::uint8_t { kForward, kBackward };

enum class MaskKind : std::uint8_t { kNone, kBool, kAdditive };

struct AttentionProblem {
  Pass pass = Pass::kForward;
  DType dtype = DType::kFloat32;
  DeviceKind device = DeviceKind::kCpu;
  std::int64_t batch = 0;
  std::int64_t query_heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;
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

  bool operator==(const AttentionProblem&) const = default;

  std::int64_t heads_per_kv() const { return kv_heads == 0 ? 0 : query_heads / kv_heads; }
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
