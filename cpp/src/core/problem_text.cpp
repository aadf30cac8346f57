// The one-line text of a problem: only what differs from plain attention is named.
#include "flashattn/problem.h"

namespace flashattn {

namespace {

// The shortest of a few decimals that reads back well enough for a log line: "0.125", "30".
std::string number_text(double value) {
  std::string text = std::to_string(value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

// "8/2" for two sizes that differ, "8" for one.
std::string pair_text(std::int64_t a, std::int64_t b) {
  return a == b ? std::to_string(a) : std::to_string(a) + "/" + std::to_string(b);
}

std::string mask_text(const AttentionProblem& problem) {
  std::string text = " mask=" + std::string(dtype_name(problem.mask_dtype)) + "(";
  for (std::size_t i = 0; i < 4; ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(problem.mask_shape[i]);
  }
  return text + ")";
}

}  // namespace

std::string to_string(const AttentionProblem& problem) {
  std::string text = problem.pass == Pass::kForward ? "forward " : "backward ";
  text += std::string(dtype_name(problem.dtype));
  if (problem.device == DeviceKind::kMetal) text += " on metal";
  text += " B=" + std::to_string(problem.batch);
  text += " H=" + pair_text(problem.query_heads, problem.kv_heads);
  text += " T=" + pair_text(problem.seqlen_q, problem.seqlen_k);
  text += " D=" + pair_text(problem.head_dim, problem.value_dim);
  if (problem.causal == Causal::kBottomRight) text += " causal=bottom_right";
  if (problem.causal == Causal::kTopLeft) text += " causal=top_left";
  if (problem.window != Window{}) {
    text += " window=(" + std::to_string(problem.window.left) + "," +
            std::to_string(problem.window.right) + ")";
  }
  if (problem.softcap != 0.0F) text += " softcap=" + number_text(problem.softcap);
  if (problem.mask != MaskKind::kNone) text += mask_text(problem);
  if (problem.alibi) text += " alibi_slopes";
  if (problem.sinks) text += " sinks";
  if (problem.dropout.probability > 0.0) {
    text += " dropout_p=" + number_text(problem.dropout.probability);
  }
  if (problem.per_batch_q_offset) {
    text += " q_offset=per_batch";
  } else if (problem.has_q_offset) {
    text += " q_offset=" + std::to_string(problem.q_offset);
  }
  if (problem.k_offset != 0) text += " k_offset=" + std::to_string(problem.k_offset);
  if (problem.kv_lengths) text += " kv_lengths";
  if (problem.packed) text += " packed=" + pair_text(problem.total_q, problem.total_k);
  if (problem.page_size != 0) text += " page_size=" + std::to_string(problem.page_size);
  if (problem.kv_starts) text += " kv_starts";
  if (problem.kv_batch_index) text += " kv_batch_index";
  return text;
}

}  // namespace flashattn
