// From a validated call to the Entry and the Visibility of each batch entry: the position rule, in
// its only place.
//
//   seqlen_q, seqlen_k   the entry's own
//   start     the entry's first row of key that exists, else 0; keys are numbered from it
//   len       the entry's key length, else seqlen_k, less the start
//   pos(i)    i + q_offset        with a q_offset (one for the call, or the entry's own)
//             i                   without one, causal top-left
//             i + len - seqlen_q  without one, else: the last row stands at the last key
//   key j     stands at j + k_offset
//   row i sees key j < len iff pos(i) - left <= j + k_offset <= pos(i) + right; causal lowers right
//   to 0.
//
// Kept out of visibility.h, which kernels include, because this side uses the standard library.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/entry.h"
#include "core/visibility.h"
#include "flashattn/problem.h"

namespace flashattn {

// Entry b of a call whose per-batch arrays lie in host memory.
Entry make_entry(const AttentionProblem& problem, const AttentionInputs& inputs, std::int64_t b);

// All entries of such a call, [batch]; none if it is not ragged: entry b is batch index b then.
std::vector<Entry> make_entries(const AttentionProblem& problem, const AttentionInputs& inputs);

// The views with a batch axis of size 1 before the axes of a packed call, so that backends meet one
// form only.
ForwardTensors with_batch_axis(const ForwardTensors& tensors);
BackwardTensors with_batch_axis(const BackwardTensors& tensors);

// The rows of a packed view with its batch axis that no sequence owns: those past the last number
// of cu_seqlens. `axis` is that of the rows.
TensorView rows_past(const TensorView& view, std::size_t axis, const TensorView& cu_seqlens);

// One entry of the call's seqlen_q and seqlen_k whose q_offset and key length are known; nullopt
// where the call has none.
Visibility make_visibility(const AttentionProblem& problem, std::optional<std::int64_t> q_offset,
                           std::optional<std::int64_t> kv_length);

// Entry b of a call whose per-batch arrays lie in host memory.
Visibility make_visibility(const AttentionProblem& problem, const AttentionInputs& inputs,
                           std::int64_t b);

// All entries of such a call, [batch]. `reused`: an older list, whose memory the new one takes.
std::vector<Visibility> make_visibilities(const AttentionProblem& problem,
                                          const AttentionInputs& inputs,
                                          std::vector<Visibility> reused = {});

// Element [row] or [row, column] of an int32 or int64 view of host memory.
std::int64_t read_integer(const TensorView& view, std::int64_t row, std::int64_t column = 0);

}  // namespace flashattn
