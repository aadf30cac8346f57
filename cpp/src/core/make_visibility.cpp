// The position rule; see make_visibility.h.
#include "core/make_visibility.h"

#include <utility>

namespace flashattn {

namespace {

// Sizes of one entry as the position rule takes them.
struct EntryLengths {
  std::int64_t seqlen_q = 0;
  std::int64_t keys = 0;  // len
};

Visibility visibility_of(const AttentionProblem& problem, const EntryLengths& lengths,
                         std::optional<std::int64_t> q_offset) {
  std::int64_t position = lengths.keys - lengths.seqlen_q;  // of row 0
  if (q_offset) {
    position = *q_offset;
  } else if (problem.causal == Causal::kTopLeft) {
    position = 0;
  }
  Visibility visibility{.seqlen_q = lengths.seqlen_q,
                        .key_limit = lengths.keys,
                        .shift = position - problem.k_offset};
  const Window& window = problem.window;
  if (window.left >= 0 && window.left < kUnlimited) visibility.left = window.left;
  if (window.right >= 0 && window.right < kUnlimited) visibility.right = window.right;
  if (problem.causal != Causal::kNone) visibility.right = 0;
  return visibility;
}

TensorView with_leading_axis(const TensorView& view, int rank) {
  if (view.rank != rank) return view;
  TensorView result = view;
  result.rank = rank + 1;
  result.shape[0] = 1;
  result.stride[0] = 0;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(rank); ++axis) {
    result.shape[axis + 1] = view.shape[axis];
    result.stride[axis + 1] = view.stride[axis];
  }
  return result;
}

void add_batch_axis(AttentionInputs& inputs) {
  for (TensorView* view : {&inputs.query, &inputs.key, &inputs.value}) {
    *view = with_leading_axis(*view, 3);
  }
}

}  // namespace

Entry make_entry(const AttentionProblem& problem, const AttentionInputs& inputs, std::int64_t b) {
  Entry entry{.query = {.batch = b},
              .key = {.batch = b},
              .seqlen_q = problem.seqlen_q,
              .seqlen_k = problem.seqlen_k};
  if (problem.packed) {
    const std::int64_t row = read_integer(inputs.cu_seqlens_q, b);
    entry.query = {.batch = 0, .row = row};
    entry.seqlen_q = read_integer(inputs.cu_seqlens_q, b + 1) - row;
    const std::int64_t key_row = read_integer(inputs.cu_seqlens_k, b);
    if (problem.page_size == 0) entry.key = {.batch = 0, .row = key_row};
    entry.seqlen_k = read_integer(inputs.cu_seqlens_k, b + 1) - key_row;
  }
  if (problem.kv_batch_index) entry.key.batch = read_integer(inputs.kv_batch_index, b);
  if (problem.kv_starts) {
    const std::int64_t start = read_integer(inputs.kv_starts, b);
    entry.key.row += start;
    entry.seqlen_k -= start;
  }
  return entry;
}

std::vector<Entry> make_entries(const AttentionProblem& problem, const AttentionInputs& inputs) {
  std::vector<Entry> all;
  if (!problem.ragged()) return all;
  all.reserve(static_cast<std::size_t>(problem.batch));
  for (std::int64_t b = 0; b < problem.batch; ++b) all.push_back(make_entry(problem, inputs, b));
  return all;
}

ForwardTensors with_batch_axis(const ForwardTensors& tensors) {
  ForwardTensors result = tensors;
  add_batch_axis(result.inputs);
  result.out = with_leading_axis(result.out, 3);
  result.lse = with_leading_axis(result.lse, 2);
  return result;
}

BackwardTensors with_batch_axis(const BackwardTensors& tensors) {
  BackwardTensors result = tensors;
  add_batch_axis(result.inputs);
  for (TensorView* view : {&result.out, &result.dout, &result.dq, &result.dk, &result.dv}) {
    *view = with_leading_axis(*view, 3);
  }
  for (TensorView* view : {&result.lse, &result.dlse}) *view = with_leading_axis(*view, 2);
  return result;
}

TensorView rows_past(const TensorView& view, std::size_t axis, const TensorView& cu_seqlens) {
  if (!view) return view;
  const std::int64_t first = read_integer(cu_seqlens, cu_seqlens.shape[0] - 1);
  const std::int64_t offset = first * view.stride[axis];
  const std::int64_t item = static_cast<std::int64_t>(item_size(view.dtype));
  TensorView rest = view;
  rest.shape[axis] -= first;
  if (rest.shape[axis] == 0) return rest;  // nothing lies there, not even an address
  if (view.device == DeviceKind::kMetal) {
    rest.byte_offset += offset * item;
  } else {
    rest.data = static_cast<char*>(view.data) + offset * item;
  }
  return rest;
}

Visibility make_visibility(const AttentionProblem& problem, std::optional<std::int64_t> q_offset,
                           std::optional<std::int64_t> kv_length) {
  return visibility_of(problem,
                       {.seqlen_q = problem.seqlen_q, .keys = kv_length.value_or(problem.seqlen_k)},
                       q_offset);
}

Visibility make_visibility(const AttentionProblem& problem, const AttentionInputs& inputs,
                           std::int64_t b) {
  std::optional<std::int64_t> q_offset;
  if (problem.has_q_offset) {
    q_offset = inputs.q_offsets ? read_integer(inputs.q_offsets, b) : problem.q_offset;
  }
  const Entry entry = make_entry(problem, inputs, b);
  EntryLengths lengths{.seqlen_q = entry.seqlen_q, .keys = entry.seqlen_k};
  if (inputs.kv_lengths) {
    const std::int64_t start = problem.kv_starts ? read_integer(inputs.kv_starts, b) : 0;
    lengths.keys = read_integer(inputs.kv_lengths, b) - start;
  }
  return visibility_of(problem, lengths, q_offset);
}

std::vector<Visibility> make_visibilities(const AttentionProblem& problem,
                                          const AttentionInputs& inputs,
                                          std::vector<Visibility> reused) {
  std::vector<Visibility> all = std::move(reused);
  all.clear();
  all.reserve(static_cast<std::size_t>(problem.batch));
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    all.push_back(make_visibility(problem, inputs, b));
  }
  return all;
}

std::int64_t read_integer(const TensorView& view, std::int64_t row, std::int64_t column) {
  const std::int64_t at = (view.shape[0] == 1 ? 0 : row * view.stride[0]) +
                          (view.rank < 2 || view.shape[1] == 1 ? 0 : column * view.stride[1]);
  if (view.dtype == DType::kInt32) return static_cast<const std::int32_t*>(view.data)[at];
  return static_cast<const std::int64_t*>(view.data)[at];
}

}  // namespace flashattn
