// Attention by its definition, one score at a time, for tests. `Real` is what products and sums are
// computed in: double gives the oracle, float the error of an implementation without fusion. Such
// an implementation also stores scores, probabilities and their gradients in the call's dtype:
// `rounding` is applied to those.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "core/make_visibility.h"
#include "flashattn/problem.h"
#include "tensors.h"

namespace flashattn::testing {

// In memory order of the contiguous arrays of a Call.
struct NaiveResult {
  std::vector<double> out, lse, dq, dk, dv;
};

template <typename Real>
class Naive {
 public:
  using Rounding = std::function<Real(Real)>;

  Naive(const Call& call, const AttentionProblem& problem, std::vector<Visibility> visibility,
        Rounding rounding)
      : p_(problem),
        visibility_(std::move(visibility)),
        round_(std::move(rounding)),
        query_(read(call.query)),
        key_(read(call.key)),
        value_(read(call.value)),
        dout_(read(call.dout)),
        dlse_(read(call.dlse)),
        out_(dout_.size()),
        lse_(dlse_.size()),
        dq_(query_.size()),
        dk_(key_.size()),
        dv_(value_.size()) {}

  NaiveResult run() {
    for (std::int64_t b = 0; b < p_.batch; ++b) {
      for (std::int64_t h = 0; h < p_.query_heads; ++h) {
        for (std::int64_t i = 0; i < p_.seqlen_q; ++i) row(b, h, i);
      }
    }
    return {.out = rounded(out_),
            .lse = {lse_.begin(), lse_.end()},
            .dq = rounded(dq_),
            .dk = rounded(dk_),
            .dv = rounded(dv_)};
  }

 private:
  static std::vector<Real> read(const Array& array) {
    std::vector<Real> values(static_cast<std::size_t>(array.count()));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = array.get(static_cast<std::int64_t>(i));
    }
    return values;
  }
  std::vector<double> rounded(const std::vector<Real>& values) const {
    std::vector<double> result;
    for (const Real value : values) result.push_back(round_(value));
    return result;
  }
  // Row (b, t, h) of a (batch, seqlen, heads, dim) array.
  struct Axes {
    std::int64_t seqlen, heads, dim;
    std::size_t row(std::int64_t b, std::int64_t t, std::int64_t h) const {
      return static_cast<std::size_t>(((b * seqlen + t) * heads + h) * dim);
    }
  };
  static Real dot(const Real* x, const Real* y, std::int64_t n) {
    Real sum = 0;
    for (std::int64_t d = 0; d < n; ++d) sum += x[d] * y[d];
    return sum;
  }
  static void add_scaled(Real* to, Real factor, const Real* from, std::int64_t n) {
    for (std::int64_t d = 0; d < n; ++d) to[d] += factor * from[d];
  }

  // One query row: its output and log-sum-exp, and what it adds to the gradients.
  void row(std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::int64_t kv_head = h / p_.heads_per_kv();
    const std::size_t q = Axes{p_.seqlen_q, p_.query_heads, p_.head_dim}.row(b, i, h);
    const std::size_t o = Axes{p_.seqlen_q, p_.query_heads, p_.value_dim}.row(b, i, h);
    const std::size_t l = Axes{p_.query_heads, p_.seqlen_q, 1}.row(b, h, i);
    const Axes key_axes{p_.seqlen_k, p_.kv_heads, p_.head_dim};
    const Axes value_axes{p_.seqlen_k, p_.kv_heads, p_.value_dim};
    const Interval keys = visibility_[static_cast<std::size_t>(b)].keys_of_row(i);

    std::vector<Real> weight;
    Real top = -std::numeric_limits<Real>::infinity();
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      const Real s = dot(&query_[q], &key_[key_axes.row(b, j, kv_head)], p_.head_dim);
      weight.push_back(round_(p_.scale * round_(s)));
      top = std::max(top, weight.back());
    }
    Real sum = 0;
    for (Real& w : weight) sum += w = std::exp(w - top);
    lse_[l] = weight.empty() ? top : top + std::log(sum);

    std::vector<Real> dp;
    Real delta = -dlse_[l];
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      const std::size_t v = value_axes.row(b, j, kv_head);
      Real& w = weight[static_cast<std::size_t>(j - keys.begin)];
      w = round_(w / sum);
      add_scaled(&out_[o], w, &value_[v], p_.value_dim);
      add_scaled(&dv_[v], w, &dout_[o], p_.value_dim);
      dp.push_back(round_(dot(&dout_[o], &value_[v], p_.value_dim)));
      delta += w * dp.back();
    }
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      const auto n = static_cast<std::size_t>(j - keys.begin);
      const std::size_t k = key_axes.row(b, j, kv_head);
      const Real ds = round_(weight[n] * (dp[n] - delta)) * p_.scale;
      add_scaled(&dq_[q], ds, &key_[k], p_.head_dim);
      add_scaled(&dk_[k], ds, &query_[q], p_.head_dim);
    }
  }

  const AttentionProblem& p_;
  std::vector<Visibility> visibility_;
  Rounding round_;
  std::vector<Real> query_, key_, value_, dout_, dlse_;
  std::vector<Real> out_, lse_, dq_, dk_, dv_;
};

}  // namespace flashattn::testing
