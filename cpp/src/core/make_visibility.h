// From a validated call to the Visibility of each batch entry: the position rule, in its only
// place.
//
//   len       the entry's key length, else seqlen_k
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

#include "core/visibility.h"
#include "flashattn/problem.h"

namespace flashattn {

// One entry whose q_offset and key length are known; nullopt where the call has none.
Visibility make_visibility(const AttentionProblem& problem, std::optional<std::int64_t> q_offset,
                           std::optional<std::int64_t> kv_length);

// Entry b of a call whose per-batch arrays lie in host memory.
Visibility make_visibility(const AttentionProblem& problem, const AttentionInputs& inputs,
                           std::int64_t b);

// All entries of such a call, [batch].
std::vector<Visibility> make_visibilities(const AttentionProblem& problem,
                                          const AttentionInputs& inputs);

// Element `index` of a one-axis int32 or int64 view of host memory.
std::int64_t read_integer(const TensorView& view, std::int64_t index);

}  // namespace flashattn
