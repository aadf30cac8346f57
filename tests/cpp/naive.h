// Attention by its definition, one score at a time, for tests. `Rounding` is applied to every value
// that an implementation without fusion would store (scores, probabilities, outputs, gradients):
// the identity gives the oracle, rounding to the call's dtype the error that such an implementation
// makes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "core/make_visibility.h"
#include "flashattn/problem.h"
#include "tensors.h"

namespace flashattn::testing {

using Rounding = std::function<double(double)>;

// In memory order of the contiguous arrays of a Call.
struct NaiveResult {
  std::vector<double> out, lse, dq, dk, dv;
};

class Naive {
 public:
  Naive(const Call& call, const AttentionProblem& problem, std::vector<Visibility> visibility,
        Rounding rounding)
      : call_(call), p_(problem), visibility_(std::move(visibility)), round_(std::move(rounding)) {}

  NaiveResult run() {
    result_.out.assign(size(p_.seqlen_q, p_.query_heads, p_.value_dim), 0.0);
    result_.lse.assign(size(p_.query_heads, p_.seqlen_q, 1), 0.0);
    result_.dq.assign(size(p_.seqlen_q, p_.query_heads, p_.head_dim), 0.0);
    result_.dk.assign(size(p_.seqlen_k, p_.kv_heads, p_.head_dim), 0.0);
    result_.dv.assign(size(p_.seqlen_k, p_.kv_heads, p_.value_dim), 0.0);
    for (std::int64_t b = 0; b < p_.batch; ++b) {
      for (std::int64_t h = 0; h < p_.query_heads; ++h) {
        for (std::int64_t i = 0; i < p_.seqlen_q; ++i) row(b, h, i);
      }
    }
    for (std::vector<double>* values : {&result_.out, &result_.dq, &result_.dk, &result_.dv}) {
      for (double& value : *values) value = round_(value);
    }
    return result_;
  }

 private:
  std::size_t size(std::int64_t a, std::int64_t b, std::int64_t c) const {
    return static_cast<std::size_t>(p_.batch * a * b * c);
  }
  // Start of row (b, t, h) of a (batch, seqlen, heads, dim) array.
  static std::int64_t at(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t seqlen,
                         std::int64_t heads, std::int64_t dim) {
    return ((b * seqlen + t) * heads + h) * dim;
  }
  static double dot(const Array& x, std::int64_t i, const Array& y, std::int64_t j,
                    std::int64_t n) {
    double sum = 0.0;
    for (std::int64_t d = 0; d < n; ++d) {
      sum += static_cast<double>(x.get(i + d)) * static_cast<double>(y.get(j + d));
    }
    return sum;
  }

  // One query row: its output and log-sum-exp, and what it adds to the gradients.
  void row(std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::int64_t kv_head = h / p_.heads_per_kv();
    const std::int64_t q_at = at(b, i, h, p_.seqlen_q, p_.query_heads, p_.head_dim);
    const std::int64_t o_at = at(b, i, h, p_.seqlen_q, p_.query_heads, p_.value_dim);
    const std::int64_t lse_at = (b * p_.query_heads + h) * p_.seqlen_q + i;
    const Interval keys = visibility_[static_cast<std::size_t>(b)].keys_of_row(i);
    const auto key_at = [&](std::int64_t j) {
      return at(b, j, kv_head, p_.seqlen_k, p_.kv_heads, p_.head_dim);
    };
    const auto value_at = [&](std::int64_t j) {
      return at(b, j, kv_head, p_.seqlen_k, p_.kv_heads, p_.value_dim);
    };
    std::vector<double> weights;
    double top = -std::numeric_limits<double>::infinity();
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      const double s = dot(call_.query, q_at, call_.key, key_at(j), p_.head_dim);
      weights.push_back(round_(static_cast<double>(p_.scale) * round_(s)));
      top = std::max(top, weights.back());
    }
    double sum = 0.0;
    for (double& w : weights) sum += w = std::exp(w - top);
    result_.lse[static_cast<std::size_t>(lse_at)] = weights.empty() ? top : top + std::log(sum);

    double delta = -static_cast<double>(call_.dlse.get(lse_at));
    std::vector<double> dp;
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      double& weight = weights[static_cast<std::size_t>(j - keys.begin)];
      weight = round_(weight / sum);
      for (std::int64_t d = 0; d < p_.value_dim; ++d) {
        result_.out[static_cast<std::size_t>(o_at + d)] +=
            weight * static_cast<double>(call_.value.get(value_at(j) + d));
        result_.dv[static_cast<std::size_t>(value_at(j) + d)] +=
            weight * static_cast<double>(call_.dout.get(o_at + d));
      }
      dp.push_back(round_(dot(call_.dout, o_at, call_.value, value_at(j), p_.value_dim)));
      delta += weight * dp.back();
    }
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      const auto n = static_cast<std::size_t>(j - keys.begin);
      const double ds = round_(weights[n] * (dp[n] - delta)) * static_cast<double>(p_.scale);
      for (std::int64_t d = 0; d < p_.head_dim; ++d) {
        result_.dq[static_cast<std::size_t>(q_at + d)] +=
            ds * static_cast<double>(call_.key.get(key_at(j) + d));
        result_.dk[static_cast<std::size_t>(key_at(j) + d)] +=
            ds * static_cast<double>(call_.query.get(q_at + d));
      }
    }
  }

  const Call& call_;
  const AttentionProblem& p_;
  std::vector<Visibility> visibility_;
  Rounding round_;
  NaiveResult result_;
};

}  // namespace flashattn::testing
