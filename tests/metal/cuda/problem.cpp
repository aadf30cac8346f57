// The definition of attention and its gradients in float64, row by row, hidden positions left out
// rather than multiplied by zero.
#include "problem.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>

#include "dropout.h"

namespace {

// Sum of four uniform values scaled to variance 1: near enough to normal.
class Source {
 public:
  float next() {
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      state_ = state_ * 1664525u + 1013904223u;
      sum += static_cast<float>(state_ >> 8) / 16777216.0f - 0.5f;
    }
    return sum * 1.7320508f;
  }

 private:
  std::uint32_t state_ = 12345;
};

std::vector<float> draw(Source& source, std::size_t count, Storage storage) {
  std::vector<float> values(count);
  for (float& x : values) x = round_to(source.next(), storage);
  return values;
}

// Offset of row `i` of head `h` in a (batch, row, head, dim) tensor.
std::size_t at(int b, int i, int h, int rows, int heads, int dim) {
  return ((static_cast<std::size_t>(b) * rows + i) * heads + h) * dim;
}

// Scratch for one query row: the keys that it sees, and what there is of each of them.
struct Row {
  int begin = 0, end = 0;
  std::vector<double> p, keep, dp, dp_magnitude;  // keep: what dropout multiplies p and dp with
};

class Computation {
 public:
  Computation(const Problem& problem, Reference& result) : p_(problem), r_(result) {}

  // One (batch, key head): its query heads write to the same dk and dv, so they stay together.
  void run_group(int b, int kv_head) {
    Row row;
    row.p.resize(p_.seqlen_k);
    row.keep.resize(p_.seqlen_k);
    row.dp.resize(p_.seqlen_k);
    row.dp_magnitude.resize(p_.seqlen_k);
    for (int g = 0; g < p_.group(); ++g)
      for (int i = 0; i < p_.seqlen_q; ++i) run_row(row, b, kv_head, kv_head * p_.group() + g, i);
  }

 private:
  void run_row(Row& row, int b, int kv_head, int h, int i) {
    row.end = std::clamp(p_.visible_end(i), 0, p_.seqlen_k);
    row.begin = std::clamp(p_.visible_begin(i), 0, row.end);
    const std::size_t table = (static_cast<std::size_t>(b) * p_.query_heads + h) * p_.seqlen_q + i;
    const double infinity = std::numeric_limits<double>::infinity();
    r_.lse.value[table] = -infinity;
    if (row.begin == row.end) return;
    const float* q = &r_.query[at(b, i, h, p_.seqlen_q, p_.query_heads, p_.head_dim)];
    const double scale = 1.0 / std::sqrt(static_cast<double>(p_.head_dim));
    double top = -infinity;
    double score_magnitude = 0;
    for (int j = row.begin; j < row.end; ++j) {
      const float* k = key(b, j, kv_head);
      double s = 0, magnitude = 0;
      for (int d = 0; d < p_.head_dim; ++d) {
        s += static_cast<double>(q[d]) * k[d];
        magnitude += std::fabs(static_cast<double>(q[d]) * k[d]);
      }
      row.p[j] = s * scale;
      if (row.p[j] > top || std::isnan(row.p[j])) top = row.p[j];
      score_magnitude = std::max(score_magnitude, magnitude * scale);
    }
    double total = 0;
    for (int j = row.begin; j < row.end; ++j) total += row.p[j] = std::exp(row.p[j] - top);
    r_.lse.value[table] = top + std::log(total);
    r_.lse.magnitude[table] = 1 + score_magnitude + std::fabs(r_.lse.value[table]);
    // An error of a score is a relative error of its probability.
    finish_row(row, b, kv_head, h, i, table, total, 1 + score_magnitude);
  }

  void finish_row(Row& row, int b, int kv_head, int h, int i, std::size_t table, double total,
                  double sensitivity) {
    const std::size_t out_at = at(b, i, h, p_.seqlen_q, p_.query_heads, p_.value_dim);
    const float* dout = &r_.dout[out_at];
    for (int j = row.begin; j < row.end; ++j) {
      row.p[j] /= total;
      row.keep[j] = keep_factor(b, h, i, j);
      const double kept = row.p[j] * row.keep[j];
      const float* v = value(b, j, kv_head);
      row.dp[j] = row.dp_magnitude[j] = 0;
      for (int d = 0; d < p_.value_dim; ++d) {
        r_.out.value[out_at + d] += kept * v[d];
        r_.out.magnitude[out_at + d] += kept * std::fabs(v[d]) * sensitivity;
        row.dp[j] += static_cast<double>(dout[d]) * v[d];
        row.dp_magnitude[j] += std::fabs(static_cast<double>(dout[d]) * v[d]);
      }
      row.dp[j] *= row.keep[j];
      row.dp_magnitude[j] *= row.keep[j];
    }
    double delta = 0, delta_magnitude = 0;
    for (int d = 0; d < p_.value_dim; ++d) {
      delta += r_.out.value[out_at + d] * dout[d];
      delta_magnitude += std::fabs(r_.out.value[out_at + d] * dout[d]);
    }
    r_.delta.value[table] = delta;
    r_.delta.magnitude[table] = delta_magnitude;
    add_gradients(row, b, kv_head, h, i, delta, delta_magnitude, sensitivity);
    if (p_.has_options()) add_options(row, table, i, delta, delta_magnitude * sensitivity);
  }

  // `size` of delta includes the sensitivity of the scores.
  void add_options(const Row& row, std::size_t table, int i, double delta, double size) {
    for (int j = row.begin; j < row.end; ++j) {
      const double ds = row.p[j] * (row.dp[j] - delta);
      const double magnitude = row.p[j] * (row.dp_magnitude[j] + size);
      const double distance = std::abs(i + p_.shift() - j);
      r_.dmask.value[table * p_.seqlen_k + j] = ds;
      r_.dmask.magnitude[table * p_.seqlen_k + j] = magnitude;
      r_.slope_rows.value[table] -= ds * distance;
      r_.slope_rows.magnitude[table] += magnitude * distance;
    }
  }

  void add_gradients(const Row& row, int b, int kv_head, int h, int i, double delta,
                     double delta_magnitude, double sensitivity) {
    const std::size_t q_at = at(b, i, h, p_.seqlen_q, p_.query_heads, p_.head_dim);
    const std::size_t out_at = at(b, i, h, p_.seqlen_q, p_.query_heads, p_.value_dim);
    const double scale = 1.0 / std::sqrt(static_cast<double>(p_.head_dim));
    for (int j = row.begin; j < row.end; ++j) {
      const std::size_t k_at = at(b, j, kv_head, p_.seqlen_k, p_.kv_heads, p_.head_dim);
      const std::size_t v_at = at(b, j, kv_head, p_.seqlen_k, p_.kv_heads, p_.value_dim);
      const double kept = row.p[j] * row.keep[j];
      const double ds = row.p[j] * (row.dp[j] - delta) * scale;
      const double size = row.p[j] * (row.dp_magnitude[j] + delta_magnitude) * scale * sensitivity;
      for (int d = 0; d < p_.head_dim; ++d) {
        r_.dq.value[q_at + d] += ds * r_.key[k_at + d];
        r_.dq.magnitude[q_at + d] += size * std::fabs(r_.key[k_at + d]);
        r_.dk.value[k_at + d] += ds * r_.query[q_at + d];
        r_.dk.magnitude[k_at + d] += size * std::fabs(r_.query[q_at + d]);
      }
      for (int d = 0; d < p_.value_dim; ++d) {
        r_.dv.value[v_at + d] += kept * r_.dout[out_at + d];
        r_.dv.magnitude[v_at + d] += kept * std::fabs(r_.dout[out_at + d]) * sensitivity;
      }
    }
  }

  double keep_factor(int b, int h, int i, int j) const {
    if (p_.dropout_p == 0) return 1;
    return keeps(p_, threshold_, b, h, i, j) ? 1 / (1 - p_.dropout_p) : 0;
  }

  const float* key(int b, int j, int h) const {
    return &r_.key[at(b, j, h, p_.seqlen_k, p_.kv_heads, p_.head_dim)];
  }
  const float* value(int b, int j, int h) const {
    return &r_.value[at(b, j, h, p_.seqlen_k, p_.kv_heads, p_.value_dim)];
  }

  const Problem& p_;
  Reference& r_;
  const std::uint32_t threshold_ = dropout_threshold(p_);
};

void size_expected(Expected& expected, std::size_t count) {
  expected.value.assign(count, 0);
  expected.magnitude.assign(count, 0);
}

void plant_nan(const Problem& p, Reference& r) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int b = 0; b < p.batch; ++b) {
    if (p.non_finite == 'v')
      for (int h = 0; h < p.kv_heads; ++h)
        std::fill_n(&r.value[at(b, p.seqlen_k - 1, h, p.seqlen_k, p.kv_heads, p.value_dim)],
                    p.value_dim, nan);
    if (p.non_finite == 'q')
      for (int h = 0; h < p.query_heads; ++h) {
        std::fill_n(&r.query[at(b, 0, h, p.seqlen_q, p.query_heads, p.head_dim)], p.head_dim, nan);
        std::fill_n(&r.dout[at(b, 0, h, p.seqlen_q, p.query_heads, p.value_dim)], p.value_dim, nan);
      }
  }
}

// dmask of every head becomes that of the mask they share.
void sum_heads(const Problem& p, Reference& r) {
  Expected shared;
  const std::size_t plane = static_cast<std::size_t>(p.seqlen_q) * p.seqlen_k;
  size_expected(shared, p.batch * plane);
  for (std::size_t e = 0; e < r.dmask.value.size(); ++e) {
    const std::size_t to = e / plane / p.query_heads * plane + e % plane;
    shared.value[to] += r.dmask.value[e];
    shared.magnitude[to] += r.dmask.magnitude[e];
  }
  r.dmask = std::move(shared);
}

// What is one number per head.
void sum_rows(const Problem& p, Reference& r, float sink) {
  size_expected(r.slopes, p.query_heads);
  size_expected(r.sinks, p.query_heads);
  for (std::size_t row = 0; row < r.lse.value.size(); ++row) {
    const std::size_t h = row / p.seqlen_q % p.query_heads;
    r.slopes.value[h] += r.slope_rows.value[row];
    r.slopes.magnitude[h] += std::fabs(r.slope_rows.value[row]);
    const double weight = std::exp(sink - r.lse.value[row]);
    r.sinks.value[h] -= weight * r.delta.value[row];
    r.sinks.magnitude[h] += weight * std::fabs(r.delta.value[row]) * (1 + r.lse.magnitude[row]);
  }
}

}  // namespace

std::string Problem::name() const {
  std::string text =
      std::to_string(batch) + "x" + std::to_string(seqlen_q) + "x" + std::to_string(seqlen_k);
  text += " heads " + std::to_string(query_heads) + "/" + std::to_string(kv_heads);
  text += " dims " + std::to_string(head_dim) + "/" + std::to_string(value_dim);
  if (causal) text += " causal";
  if (window >= 0) text += " window " + std::to_string(window);
  if (dropout_p > 0) text += " dropout";
  if (non_finite != ' ') text += std::string(" NaN:") + non_finite;
  return text;
}

Reference make_inputs(const Problem& p, Storage storage) {
  Reference r;
  Source source;
  const auto count = [&](int rows, int heads, int dim) {
    return static_cast<std::size_t>(p.batch) * rows * heads * dim;
  };
  r.query = draw(source, count(p.seqlen_q, p.query_heads, p.head_dim), storage);
  r.key = draw(source, count(p.seqlen_k, p.kv_heads, p.head_dim), storage);
  r.value = draw(source, count(p.seqlen_k, p.kv_heads, p.value_dim), storage);
  r.dout = draw(source, count(p.seqlen_q, p.query_heads, p.value_dim), storage);
  plant_nan(p, r);
  size_expected(r.out, r.dout.size());
  size_expected(r.dq, r.query.size());
  size_expected(r.dk, r.key.size());
  size_expected(r.dv, r.value.size());
  size_expected(r.lse, count(p.seqlen_q, p.query_heads, 1));
  size_expected(r.delta, count(p.seqlen_q, p.query_heads, 1));
  if (p.has_options()) {
    size_expected(r.dmask, count(p.seqlen_q, p.query_heads, p.seqlen_k));
    size_expected(r.slope_rows, count(p.seqlen_q, p.query_heads, 1));
  }
  return r;
}

Reference make_reference(const Problem& p, Storage storage, float sink) {
  Reference r = make_inputs(p, storage);
  std::atomic<int> next{0};
  const auto work = [&] {
    for (int task = next++; task < p.batch * p.kv_heads; task = next++)
      Computation(p, r).run_group(task / p.kv_heads, task % p.kv_heads);
  };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i)
    threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  if (p.has_options()) {
    sum_heads(p, r);
    sum_rows(p, r, sink);
  }
  return r;
}
