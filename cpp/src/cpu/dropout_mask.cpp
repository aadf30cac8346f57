// dropout_mask: rows of scores in parallel, one Philox block for four neighbouring keys. It is here
// for the thread pool; the numbers are core/philox.h's.
#include "core/checks.h"
#include "core/make_dropout.h"
#include "cpu/thread_pool.h"
#include "flashattn/dropout.h"

namespace flashattn {
namespace {

// Weights below which waking a helper costs more than it gains.
constexpr std::int64_t kMinWeights = 4096;

void fill_row(const DropoutRule& rule, std::uint64_t first, std::int64_t keys, float* to,
              std::int64_t stride) {
  PhiloxBlock block{};
  for (std::int64_t j = 0; j < keys; ++j, to += stride) {
    const std::uint64_t n = first + static_cast<std::uint64_t>(j);
    if (j == 0 || n % 4 == 0) block = dropout_block(rule.seed, rule.offset, n / 4);
    *to = (block.word[n % 4] >> 8) >= rule.threshold ? rule.keep_scale : 0.0F;
  }
}

AttentionProblem problem_of(const TensorView& mask, const Dropout& dropout) {
  const Checks check("dropout_mask", Pass::kForward);
  const NamedView arg{"mask", mask};
  check.rank(arg, 4);
  check.dtype_equal(arg, "", DType::kFloat32);
  if (mask.device != DeviceKind::kCpu) {
    check.fail_unsupported("mask.device", "metal", "be host memory");
  }
  check.writable(arg, DeviceKind::kCpu);
  AttentionProblem problem;
  problem.batch = mask.shape[0];
  problem.query_heads = mask.shape[1];
  problem.seqlen_q = mask.shape[2];
  problem.seqlen_k = mask.shape[3];
  read_dropout(check, dropout, problem);
  return problem;
}

}  // namespace

void dropout_mask(const TensorView& mask, const Dropout& dropout) {
  const AttentionProblem problem = problem_of(mask, dropout);
  if (is_empty(mask)) return;
  const DropoutRule rule = make_dropout_rule(problem);
  const std::int64_t rows = problem.batch * problem.query_heads * problem.seqlen_q;
  const std::int64_t per_body = 1 + kMinWeights / problem.seqlen_k;
  const auto fill = [&](std::int64_t row) {
    const std::int64_t i = row % problem.seqlen_q;
    const std::int64_t h = row / problem.seqlen_q % problem.query_heads;
    const std::int64_t b = row / problem.seqlen_q / problem.query_heads;
    const std::uint64_t first =
        rule.numbering.index(static_cast<std::uint64_t>(b), static_cast<std::uint64_t>(h),
                             static_cast<std::uint64_t>(i), 0);
    float* const to = static_cast<float*>(mask.data) + b * mask.stride[0] + h * mask.stride[1] +
                      i * mask.stride[2];
    fill_row(rule, first, problem.seqlen_k, to, mask.stride[3]);
  };
  cpu::ThreadPool::global().parallel_for((rows + per_body - 1) / per_body, [&](std::int64_t body) {
    const std::int64_t end = body * per_body + per_body;
    for (std::int64_t row = body * per_body; row < end && row < rows; ++row) fill(row);
  });
}

}  // namespace flashattn
