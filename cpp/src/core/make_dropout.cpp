// The dropout of a call as integers; see make_dropout.h.
#include "core/make_dropout.h"

#include <cmath>

namespace flashattn {
namespace {

DropoutNumbering numbering_of(const AttentionProblem& problem) {
  const DropoutShard whole{.global_heads = problem.query_heads,
                           .global_queries = problem.seqlen_q,
                           .global_keys = problem.seqlen_k};
  const DropoutShard shard = problem.dropout.shard.value_or(whole);
  return {.global_heads = static_cast<std::uint64_t>(shard.global_heads),
          .head_start = static_cast<std::uint64_t>(shard.head_start),
          .global_queries = static_cast<std::uint64_t>(shard.global_queries),
          .query_start = static_cast<std::uint64_t>(shard.query_start),
          .global_keys = static_cast<std::uint64_t>(shard.global_keys),
          .key_start = static_cast<std::uint64_t>(shard.key_start)};
}

}  // namespace

DropoutRule make_dropout_rule(const AttentionProblem& problem) {
  const double probability = problem.dropout.probability;
  if (probability == 0.0) return {};
  // Multiplying by a power of two is exact, so unit >= probability iff word >= threshold.
  const double threshold = std::ceil(probability * 0x1p24);
  const double keep = 1.0 - probability;
  return {.threshold = static_cast<std::uint32_t>(threshold),
          .keep_scale = keep > 0.0 ? static_cast<float>(1.0 / keep) : 0.0F,
          .seed = problem.dropout.seed,
          .offset = problem.dropout.offset,
          .numbering = numbering_of(problem)};
}

}  // namespace flashattn
