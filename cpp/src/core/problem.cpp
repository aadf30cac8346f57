// make_problem: every rule about what a call may be, in one place. Shapes first, then options, then
// the optional arrays. After it the rest of the library asserts and never re-checks.
#include "flashattn/problem.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string>

#include "core/checks.h"
#include "core/problem_layout.h"
#include "flashattn/error.h"

namespace flashattn {

namespace {

// Positions stay this far from kUnlimited so that no sum of a few of them can overflow.
constexpr std::int64_t kMaxOffset = std::int64_t{1} << 59;

std::string number_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  std::string text = std::to_string(value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

void check_shard(const Checks& check, const DropoutShard& shard, const AttentionProblem& problem) {
  struct Axis {
    const char* name;
    std::int64_t global;
    std::int64_t start;
    std::int64_t local;
  };
  const Axis axes[] = {
      {"dropout_shard.head_start", shard.global_heads, shard.head_start, problem.query_heads},
      {"dropout_shard.query_start", shard.global_queries, shard.query_start, problem.seqlen_q},
      {"dropout_shard.key_start", shard.global_keys, shard.key_start, problem.seqlen_k},
  };
  for (const Axis& axis : axes) {
    // Written so that no sum can overflow.
    if (axis.start >= 0 && axis.global >= axis.local && axis.start <= axis.global - axis.local) {
      continue;
    }
    check.fail_value(axis.name, std::to_string(axis.start),
                     "place " + std::to_string(axis.local) + " inside the global " +
                         std::to_string(axis.global));
  }
}

// Position of row 0 minus that of key 0, where one number holds for the whole call; see
// make_visibility. With key lengths it is the position in the longest possible entry, which is the
// one that counts below.
std::int64_t common_shift(const AttentionProblem& problem) {
  if (problem.has_q_offset) return problem.q_offset - problem.k_offset;
  const std::int64_t row =
      problem.causal == Causal::kTopLeft ? 0 : problem.seqlen_k - problem.seqlen_q;
  return row - problem.k_offset;
}

// A side that cannot exclude a key becomes -1. The right bound is tightest at row 0, which stands
// at `shift` and must reach key seqlen_k - 1; the left one at the last row, which must reach key 0.
// Aligned bottom-right (shift = seqlen_k - seqlen_q) that is right >= seqlen_q - 1 and left >=
// seqlen_k - 1. Key lengths move the rows and the last key together there, so the same numbers hold
// for every entry.
Window normalised_window(Window window, const AttentionProblem& problem) {
  // Under causal no key past the row's own position is left for the right bound to exclude.
  if (problem.causal != Causal::kNone) window.right = -1;
  if (problem.per_batch_q_offset) return window;
  const std::int64_t shift = common_shift(problem);
  if (window.right >= problem.seqlen_k - 1 - shift && window.right >= 0) window.right = -1;
  if (window.left >= problem.seqlen_q - 1 + shift && window.left >= 0) window.left = -1;
  return window;
}

void read_offsets(const Checks& check, const AttentionInputs& in, const AttentionOptions& options,
                  AttentionProblem& problem) {
  problem.has_q_offset = options.q_offset.has_value() || in.q_offsets;
  problem.per_batch_q_offset = static_cast<bool>(in.q_offsets);
  if (options.q_offset && in.q_offsets) {
    check.fail_value("q_offset", "given twice", "be one number or one per batch entry, not both");
  }
  problem.q_offset = options.q_offset.value_or(0);
  problem.k_offset = options.k_offset;
  check.between("q_offset", problem.q_offset, -kMaxOffset, kMaxOffset);
  check.between("k_offset", problem.k_offset, -kMaxOffset, kMaxOffset);
}

void read_options(const Checks& check, const AttentionInputs& in, const AttentionOptions& options,
                  AttentionProblem& problem) {
  problem.scale = options.scale.value_or(
      static_cast<float>(1.0 / std::sqrt(static_cast<double>(problem.head_dim))));
  if (!std::isfinite(problem.scale)) {
    check.fail_value("scale", number_text(problem.scale), "be finite");
  }
  problem.softcap = options.softcap;
  if (!std::isfinite(problem.softcap) || problem.softcap < 0.0F) {
    check.fail_value("softcap", number_text(problem.softcap), "be finite and not negative");
  }
  read_dropout(check, options.dropout, problem);
  problem.causal = options.causal;
  if (options.window.left < -1) {
    check.fail_value("window.left", std::to_string(options.window.left), "be at least -1");
  }
  if (options.window.right < -1) {
    check.fail_value("window.right", std::to_string(options.window.right), "be at least -1");
  }
  read_offsets(check, in, options, problem);
  problem.window = normalised_window(options.window, problem);
}

void read_mask(const Checks& check, const TensorView& mask, AttentionProblem& problem) {
  if (!mask) return;
  if (mask.dtype != DType::kBool && !is_floating(mask.dtype)) {
    check.fail_type("mask.dtype", std::string(dtype_name(mask.dtype)),
                    "be bool or a floating-point type");
  }
  const std::array<std::int64_t, 4> scores = {problem.batch, problem.query_heads, problem.seqlen_q,
                                              problem.seqlen_k};
  problem.mask_shape = {1, 1, 1, 1};
  const auto rank = static_cast<std::size_t>(std::clamp(mask.rank, 0, 4));
  bool fits = mask.rank == static_cast<int>(rank);
  for (std::size_t i = 0; i < rank; ++i) {
    const std::size_t axis = 4 - rank + i;
    problem.mask_shape[axis] = mask.shape[i];
    fits = fits && (mask.shape[i] == 1 || mask.shape[i] == scores[axis]);
  }
  if (!fits) {
    check.fail_value("mask.shape", shape_text(mask), "broadcast to " + shape_text(scores, 4));
  }
  check.memory({"mask", mask}, problem.device);
  problem.mask = mask.dtype == DType::kBool ? MaskKind::kBool : MaskKind::kAdditive;
  problem.mask_dtype = mask.dtype;
}

void read_optional_arrays(const Checks& check, const AttentionInputs& in,
                          AttentionProblem& problem) {
  read_mask(check, in.mask, problem);
  if (in.alibi_slopes) {
    const NamedView slopes{"alibi_slopes", in.alibi_slopes};
    check.dtype_equal(slopes, "", DType::kFloat32);
    if (in.alibi_slopes.rank == 1) {
      check.shape(slopes, {problem.query_heads}, 1);
    } else {
      check.shape(slopes, {problem.batch, problem.query_heads}, 2);
    }
    check.memory(slopes, problem.device);
    problem.alibi = true;
  }
  if (in.sinks) {
    const NamedView sinks{"sinks", in.sinks};
    check.dtype_equal(sinks, "", DType::kFloat32);
    check.shape(sinks, {problem.query_heads}, 1);
    check.memory(sinks, problem.device);
    problem.sinks = true;
  }
  if (in.q_offsets) {
    check_per_batch(check, {"q_offset", in.q_offsets}, problem, -kMaxOffset, kMaxOffset);
  }
  read_places(check, in, problem);
}

AttentionProblem problem_of_inputs(const Checks& check, const AttentionInputs& in,
                                   const AttentionOptions& options) {
  AttentionProblem problem;
  read_shapes(check, in, problem);
  read_options(check, in, options, problem);
  read_optional_arrays(check, in, problem);
  return problem;
}

// out, or dout: (batch, seqlen_q, query_heads, value_dim) in the problem's dtype; (total_q,
// query_heads, value_dim) for packed sequences.
void check_out_shape(const Checks& check, const NamedView& arg, const AttentionProblem& problem) {
  check.dtype_equal(arg, "query.dtype", problem.dtype);
  if (problem.packed) {
    check.shape(arg, {problem.total_q, problem.query_heads, problem.value_dim}, 3);
  } else {
    check.shape(arg, {problem.batch, problem.seqlen_q, problem.query_heads, problem.value_dim}, 4);
  }
}

// lse, or dlse: (batch, query_heads, seqlen_q) float32; (query_heads, total_q) for packed
// sequences.
void check_lse_shape(const Checks& check, const NamedView& arg, const AttentionProblem& problem) {
  check.dtype_equal(arg, "", DType::kFloat32);
  if (problem.packed) {
    check.shape(arg, {problem.query_heads, problem.total_q}, 2);
  } else {
    check.shape(arg, {problem.batch, problem.query_heads, problem.seqlen_q}, 3);
  }
}

// What only reads a cache has no gradient.
void check_has_gradient(const Checks& check, const AttentionInputs& in) {
  const NamedView caches[] = {{"block_table", in.block_table},
                              {"kv_starts", in.kv_starts},
                              {"kv_batch_index", in.kv_batch_index}};
  for (const NamedView& arg : caches) {
    if (arg.view) {
      check.fail_unsupported(arg.name, "given", "be absent: a cache has no gradient");
    }
  }
}

// A gradient that may be absent: its input's shape, writable.
void check_gradient(const Checks& check, const NamedView& gradient, const NamedView& input,
                    DType dtype, const AttentionProblem& problem) {
  if (!gradient.view) return;
  if (!input.view) check.fail_value(gradient.name, "given", std::string("come with ") + input.name);
  check.dtype_equal(gradient, "", dtype);
  check.shape(gradient, input.view.shape, input.view.rank);
  check.writable(gradient, problem.device);
}

void check_gradients(const Checks& check, const BackwardTensors& t, AttentionProblem& problem) {
  const AttentionInputs& in = t.inputs;
  check_gradient(check, {"dq", t.dq}, {"query", in.query}, problem.dtype, problem);
  check_gradient(check, {"dk", t.dk}, {"key", in.key}, problem.dtype, problem);
  check_gradient(check, {"dv", t.dv}, {"value", in.value}, problem.dtype, problem);
  if (t.dmask && problem.mask == MaskKind::kBool) {
    check.fail_type("mask.dtype", "bool", "be a floating-point type to have a gradient");
  }
  const DType wider = in.mask.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  check_gradient(check, {"dmask", t.dmask}, {"mask", in.mask}, wider, problem);
  check_gradient(check, {"dalibi_slopes", t.dalibi_slopes}, {"alibi_slopes", in.alibi_slopes},
                 DType::kFloat32, problem);
  check_gradient(check, {"dsinks", t.dsinks}, {"sinks", in.sinks}, DType::kFloat32, problem);
  problem.mask_gradient = static_cast<bool>(t.dmask);
}

// No output overlaps an input or another output; per-batch integers are read before the writing.
void check_distinct(const Checks& check, std::initializer_list<NamedView> outputs,
                    const AttentionInputs& in, std::initializer_list<NamedView> more_inputs) {
  const NamedView inputs[] = {{"query", in.query},
                              {check.key(), in.key},
                              {check.value(), in.value},
                              {"mask", in.mask},
                              {"alibi_slopes", in.alibi_slopes},
                              {"sinks", in.sinks}};
  for (const NamedView* output = outputs.begin(); output != outputs.end(); ++output) {
    for (const NamedView& input : inputs) check.distinct(*output, input);
    for (const NamedView& input : more_inputs) check.distinct(*output, input);
    for (const NamedView* other = outputs.begin(); other != output; ++other) {
      check.distinct(*output, *other);
    }
  }
}

}  // namespace

void read_dropout(const Checks& check, const Dropout& dropout, AttentionProblem& problem) {
  const double p = dropout.probability;
  if (!(p >= 0.0 && p <= 1.0)) check.fail_value("dropout_p", number_text(p), "be between 0 and 1");
  if (dropout.shard) check_shard(check, *dropout.shard, problem);
  // Without a probability the seed means nothing, and the call is the one without dropout.
  if (p > 0.0) problem.dropout = dropout;
}

AttentionProblem problem_of_inputs(const AttentionInputs& inputs, const AttentionOptions& options) {
  const char* const function = inputs.cu_seqlens_q ? "attention_varlen" : "attention";
  AttentionProblem problem = problem_of_inputs(Checks(function, Pass::kForward), inputs, options);
  problem.function = function;
  return problem;
}

AttentionProblem make_problem(const ForwardTensors& tensors, const AttentionOptions& options) {
  return make_problem(tensors.inputs.cu_seqlens_q ? "attention_varlen" : "attention", tensors,
                      options);
}

AttentionProblem make_problem(std::string_view function, const ForwardTensors& tensors,
                              const AttentionOptions& options) {
  const Checks check(function, Pass::kForward);
  AttentionProblem problem = problem_of_inputs(check, tensors.inputs, options);
  problem.function = function;
  problem.pass = Pass::kForward;
  const NamedView out{"out", tensors.out};
  const NamedView lse{"lse", tensors.lse};
  check_out_shape(check, out, problem);
  check_lse_shape(check, lse, problem);
  for (const NamedView& arg : {out, lse}) check.writable(arg, problem.device);
  check_distinct(check, {out, lse}, tensors.inputs, {});
  return problem;
}

AttentionProblem make_problem(const BackwardTensors& tensors, const AttentionOptions& options) {
  const std::string_view function = tensors.inputs.cu_seqlens_q ? "attention_varlen" : "attention";
  const Checks check(function, Pass::kBackward);
  check_has_gradient(check, tensors.inputs);
  AttentionProblem problem = problem_of_inputs(check, tensors.inputs, options);
  problem.function = function;
  problem.pass = Pass::kBackward;
  const NamedView out{"out", tensors.out};
  const NamedView lse{"lse", tensors.lse};
  const NamedView dout{"dout", tensors.dout};
  const NamedView dlse{"dlse", tensors.dlse};
  check_out_shape(check, out, problem);
  check_out_shape(check, dout, problem);
  check_lse_shape(check, lse, problem);
  for (const NamedView& arg : {out, dout, lse}) check.memory(arg, problem.device);
  if (tensors.dlse) {
    check_lse_shape(check, dlse, problem);
    check.memory(dlse, problem.device);
  }
  check_gradients(check, tensors, problem);
  check_distinct(check,
                 {{"dq", tensors.dq},
                  {"dk", tensors.dk},
                  {"dv", tensors.dv},
                  {"dmask", tensors.dmask},
                  {"dalibi_slopes", tensors.dalibi_slopes},
                  {"dsinks", tensors.dsinks}},
                 tensors.inputs, {out, lse, dout, dlse});
  return problem;
}

}  // namespace flashattn
