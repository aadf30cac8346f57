// The position rule; see make_visibility.h.
#include "core/make_visibility.h"

namespace flashattn {

Visibility make_visibility(const AttentionProblem& problem, std::optional<std::int64_t> q_offset,
                           std::optional<std::int64_t> kv_length) {
  const std::int64_t length = kv_length.value_or(problem.seqlen_k);
  std::int64_t position = length - problem.seqlen_q;  // of row 0
  if (q_offset) {
    position = *q_offset;
  } else if (problem.causal == Causal::kTopLeft) {
    position = 0;
  }
  Visibility visibility{
      .seqlen_q = problem.seqlen_q, .key_limit = length, .shift = position - problem.k_offset};
  const Window& window = problem.window;
  if (window.left >= 0 && window.left < kUnlimited) visibility.left = window.left;
  if (window.right >= 0 && window.right < kUnlimited) visibility.right = window.right;
  if (problem.causal != Causal::kNone) visibility.right = 0;
  return visibility;
}

Visibility make_visibility(const AttentionProblem& problem, const AttentionInputs& inputs,
                           std::int64_t b) {
  std::optional<std::int64_t> q_offset;
  if (problem.has_q_offset) {
    q_offset = inputs.q_offsets ? read_integer(inputs.q_offsets, b) : problem.q_offset;
  }
  std::optional<std::int64_t> kv_length;
  if (inputs.kv_lengths) kv_length = read_integer(inputs.kv_lengths, b);
  return make_visibility(problem, q_offset, kv_length);
}

std::vector<Visibility> make_visibilities(const AttentionProblem& problem,
                                          const AttentionInputs& inputs) {
  std::vector<Visibility> all;
  all.reserve(static_cast<std::size_t>(problem.batch));
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    all.push_back(make_visibility(problem, inputs, b));
  }
  return all;
}

std::int64_t read_integer(const TensorView& view, std::int64_t index) {
  const std::int64_t at = index * (view.shape[0] == 1 ? 0 : view.stride[0]);
  if (view.dtype == DType::kInt32) return static_cast<const std::int32_t*>(view.data)[at];
  return static_cast<const std::int64_t*>(view.data)[at];
}

}  // namespace flashattn
