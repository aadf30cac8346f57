// See head_sums.h.
#include "cpu/head_sums.h"

#include <cstddef>

namespace flashattn::cpu {

HeadSums::HeadSums(const AttentionJob& job)
    : job_(job), blocks_((job.seqlen_q + kBackwardBlockQ - 1) / kBackwardBlockQ) {
  const auto count = static_cast<std::size_t>(job.batch * job.query_heads * blocks_);
  if (job.dslopes.data != nullptr) slopes_.resize(count);
  if (job.dsinks.data != nullptr) sinks_.resize(count);
}

HeadPartials HeadSums::partials() {
  return {.slopes = slopes_.empty() ? nullptr : slopes_.data(),
          .sinks = sinks_.empty() ? nullptr : sinks_.data(),
          .blocks = blocks_};
}

void HeadSums::write() const {
  write(job_.dslopes, slopes_);
  write(job_.dsinks, sinks_);
}

void HeadSums::write(const HeadGradients& to, const std::vector<double>& partials) const {
  if (to.data == nullptr) return;
  for (std::int64_t head = 0; head < job_.query_heads; ++head) {
    double sum = 0.0;
    for (std::int64_t batch = 0; batch < job_.batch; ++batch) {
      const std::int64_t first = (batch * job_.query_heads + head) * blocks_;
      for (std::int64_t i = 0; i < blocks_; ++i) {
        sum += partials[static_cast<std::size_t>(first + i)];
      }
      if (!to.per_batch) continue;
      to.data[batch * to.batch_stride + head * to.head_stride] = static_cast<float>(sum);
      sum = 0.0;
    }
    if (!to.per_batch) to.data[head * to.head_stride] = static_cast<float>(sum);
  }
}

}  // namespace flashattn::cpu
