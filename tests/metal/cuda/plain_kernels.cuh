// The kernels of plain_attention.cu. A threadblock owns 8 rows of queries, or of keys, and goes
// through the other side 256 rows at a time, one of them per thread. Sums over the other side are
// taken over these 256 first: about what a matrix product of a CPU library does, so that the
// yardstick is no worse than the one that the tests have.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <limits>

#include "dropout.h"

namespace plain {

constexpr int kOwnRows = 8;
constexpr int kThreads = 256;

struct Exact {
  using Real = double;
  static __device__ double round(double x) { return x; }
};

template <Storage storage>
struct Naive {
  using Real = float;
  static __device__ float round(float x) {
    if (storage == Storage::kFloat16) return __half2float(__float2half_rn(x));
    if (storage == Storage::kBFloat16) return __bfloat162float(__float2bfloat16_rn(x));
    return x;
  }
};

// Tensors (row, head, dim); tables (head, row): what exp takes from a score and divides by to make
// it a weight, delta, and the log-sum-exp.
template <class Real>
struct Arrays {
  const float *query, *key, *value, *dout;
  Real *out, *dq, *dk, *dv;
  Real *shift, *total, *delta, *lse;
};

// A tensor of one head.
template <class T>
struct Rows {
  T* first;
  int heads, dim;
  __device__ T* operator[](int row) const {
    return first + static_cast<std::size_t>(row) * heads * dim;
  }
};
template <class T>
__device__ Rows<T> head_of(T* tensor, int head, int heads, int dim) {
  return {tensor + head * dim, heads, dim};
}

// Sums of products of the threadblock's own rows with one row of the other side.
template <int dim, class Real, class Other>
__device__ void dots(Real (&sum)[kOwnRows], const Real (&own)[kOwnRows][dim], Other other) {
  for (int r = 0; r < kOwnRows; ++r) sum[r] = 0;
#pragma unroll 8
  for (int d = 0; d < dim; ++d) {
    const Real x = other(d);
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) sum[r] += own[r][d] * x;
  }
}

// The elements of own results that a thread has: rows first + n * groups, column d.
template <int dim>
struct Share {
  static constexpr int groups = kThreads / dim, rows = kOwnRows / groups;
  int d, first;
  __device__ Share() : d(threadIdx.x % dim), first(threadIdx.x / dim) {}
};

// Adds weights times `count` rows of the other side.
template <int dim, class Real, class Other>
__device__ void accumulate(Real (&sum)[Share<dim>::rows], const Real (&weights)[kOwnRows][kThreads],
                           int count, Other other) {
  const Share<dim> share;
  Real part[Share<dim>::rows] = {};
#pragma unroll 4
  for (int o = 0; o < count; ++o) {
    const Real x = other(o, share.d);
#pragma unroll
    for (int n = 0; n < Share<dim>::rows; ++n) {
      part[n] += weights[share.first + n * Share<dim>::groups][o] * x;
    }
  }
#pragma unroll
  for (int n = 0; n < Share<dim>::rows; ++n) sum[n] += part[n];
}

// One number per own row, of all threads' values; `scratch` is free afterwards.
template <class Real, class Combine>
__device__ void combine_threads(Real (&values)[kOwnRows], Real (&scratch)[kOwnRows][kThreads],
                                Combine combine) {
  const int t = static_cast<int>(threadIdx.x);
  for (int r = 0; r < kOwnRows; ++r) scratch[r][t] = values[r];
  __syncthreads();
  for (int step = kThreads / 2; step > 0; step /= 2) {
    if (t < step) {
      for (int r = 0; r < kOwnRows; ++r)
        scratch[r][t] = combine(scratch[r][t], scratch[r][t + step]);
    }
    __syncthreads();
  }
  for (int r = 0; r < kOwnRows; ++r) values[r] = scratch[r][0];
  __syncthreads();
}

struct Call {
  Problem problem;
  std::uint32_t threshold;
  bool from_stored;

  __device__ bool sees(int i, int j) const {
    return i < problem.seqlen_q && j < problem.seqlen_k && j >= problem.visible_begin(i) &&
           j < problem.visible_end(i);
  }
  template <class Real>
  __device__ Real keep(int h, int i, int j) const {
    if (problem.dropout_p == 0) return 1;
    const bool kept = keeps(problem, threshold, 0, h, i, j);
    return kept ? static_cast<Real>(1 / (1 - problem.dropout_p)) : Real(0);
  }
};

template <int dim, class Real>
__device__ Real scale_of() {
  return static_cast<Real>(1 / sqrt(static_cast<double>(dim)));
}

// out, lse and dq of 8 rows of one head, and the tables that columns need.
template <class Rule, int dim>
__global__ void __launch_bounds__(kThreads) own_rows(Call call, Arrays<typename Rule::Real> at) {
  using Real = typename Rule::Real;
  __shared__ Real Q[kOwnRows][dim], dO[kOwnRows][dim], weights[kOwnRows][kThreads];
  const Problem& p = call.problem;
  const int t = static_cast<int>(threadIdx.x), h = static_cast<int>(blockIdx.y);
  const int i0 = static_cast<int>(blockIdx.x) * kOwnRows, last = min(i0 + kOwnRows, p.seqlen_q) - 1;
  const Rows<const float> K = head_of(at.key, h / p.group(), p.kv_heads, dim);
  const Rows<const float> V = head_of(at.value, h / p.group(), p.kv_heads, dim);
  const Rows<Real> out = head_of(at.out, h, p.query_heads, dim);
  const Rows<Real> dq = head_of(at.dq, h, p.query_heads, dim);
  const std::size_t table = static_cast<std::size_t>(h) * p.seqlen_q + i0;
  const Real scale = scale_of<dim, Real>();
  for (int e = t; e < kOwnRows * dim; e += kThreads) {
    const int r = e / dim, d = e % dim, i = min(i0 + r, last);
    Q[r][d] = Rule::round(Real(head_of(at.query, h, p.query_heads, dim)[i][d]) * scale);
    dO[r][d] = head_of(at.dout, h, p.query_heads, dim)[i][d];
  }
  __syncthreads();
  const int begin = max(0, p.visible_begin(i0)), end = min(p.seqlen_k, p.visible_end(last));
  const auto scores = [&](Real(&s)[kOwnRows], int j) {
    dots<dim>(s, Q, [&](int d) { return Real(K[j][d]); });
    for (int r = 0; r < kOwnRows; ++r) s[r] = Rule::round(s[r]);
  };

  Real shift[kOwnRows], total[kOwnRows], s[kOwnRows];
  if (call.from_stored) {
    for (int r = 0; r < kOwnRows; ++r) {
      shift[r] = at.lse[table + min(r, last - i0)];
      total[r] = 1;
    }
  } else {
    for (int r = 0; r < kOwnRows; ++r) {
      shift[r] = -std::numeric_limits<Real>::infinity();
      total[r] = 0;
    }
    for (int j = begin + t; j < end; j += kThreads) {
      scores(s, j);
      for (int r = 0; r < kOwnRows; ++r)
        if (call.sees(i0 + r, j)) shift[r] = fmax(shift[r], s[r]);
    }
    combine_threads(shift, weights, [](Real a, Real b) { return fmax(a, b); });
    for (int j = begin + t; j < end; j += kThreads) {
      scores(s, j);
      for (int r = 0; r < kOwnRows; ++r)
        if (call.sees(i0 + r, j)) total[r] += exp(s[r] - shift[r]);
    }
    combine_threads(total, weights, [](Real a, Real b) { return a + b; });
  }
  const auto weight = [&](int r, int j) {
    return call.sees(i0 + r, j) ? Rule::round(exp(s[r] - shift[r]) / total[r]) : Real(0);
  };
  const auto weight_gradients = [&](Real(&dp)[kOwnRows], int j) {
    dots<dim>(dp, dO, [&](int d) { return Real(V[j][d]); });
    for (int r = 0; r < kOwnRows; ++r) {
      dp[r] = Rule::round(Rule::round(dp[r]) * call.keep<Real>(h, i0 + r, j));
    }
  };

  const Share<dim> share;
  Real O[Share<dim>::rows] = {}, dQ[Share<dim>::rows] = {}, delta[kOwnRows] = {}, dp[kOwnRows];
  for (int c = begin; c < end; c += kThreads) {
    const int j = c + t;
    for (int r = 0; r < kOwnRows; ++r) weights[r][t] = 0;
    if (j < end) {
      scores(s, j);
      weight_gradients(dp, j);
      for (int r = 0; r < kOwnRows; ++r) {
        const Real w = weight(r, j);
        delta[r] += w * dp[r];
        weights[r][t] = Rule::round(w * call.keep<Real>(h, i0 + r, j));
      }
    }
    __syncthreads();
    accumulate<dim>(O, weights, min(kThreads, end - c),
                    [&](int o, int d) { return Real(V[c + o][d]); });
    __syncthreads();
  }
  if (call.from_stored) {
    // dout . out, of out as it was stored: a few threads add, each in order.
    for (int r = 0; r < kOwnRows; ++r) {
      delta[r] = 0;
      if (t < dim) delta[r] = dO[r][t] * out[min(i0 + r, last)][t];
    }
  }
  combine_threads(delta, weights, [](Real a, Real b) { return a + b; });
  for (int c = begin; c < end; c += kThreads) {
    const int j = c + t;
    for (int r = 0; r < kOwnRows; ++r) weights[r][t] = 0;
    if (j < end) {
      scores(s, j);
      weight_gradients(dp, j);
      for (int r = 0; r < kOwnRows; ++r)
        weights[r][t] = Rule::round(weight(r, j) * (dp[r] - delta[r]));
    }
    __syncthreads();
    accumulate<dim>(dQ, weights, min(kThreads, end - c),
                    [&](int o, int d) { return Real(K[c + o][d]); });
    __syncthreads();
  }

  for (int n = 0; n < Share<dim>::rows; ++n) {
    const int i = i0 + share.first + n * Share<dim>::groups;
    if (i > last) continue;
    out[i][share.d] = Rule::round(O[n]);
    dq[i][share.d] = Rule::round(Rule::round(dQ[n]) * scale);
  }
  for (int r = 0; r < kOwnRows; ++r) {
    if (t != r || i0 + r > last) continue;
    at.shift[table + r] = shift[r];
    at.total[table + r] = total[r];
    at.delta[table + r] = delta[r];
    if (!call.from_stored) at.lse[table + r] = shift[r] + log(total[r]);
  }
}

// dk and dv of 8 keys of one key head.
template <class Rule, int dim>
__global__ void __launch_bounds__(kThreads) own_keys(Call call, Arrays<typename Rule::Real> at) {
  using Real = typename Rule::Real;
  __shared__ Real K[kOwnRows][dim], V[kOwnRows][dim], weights[kOwnRows][kThreads];
  const Problem& p = call.problem;
  const int t = static_cast<int>(threadIdx.x), kv_head = static_cast<int>(blockIdx.y);
  const int j0 = static_cast<int>(blockIdx.x) * kOwnRows, last = min(j0 + kOwnRows, p.seqlen_k) - 1;
  const Real scale = scale_of<dim, Real>();
  for (int e = t; e < kOwnRows * dim; e += kThreads) {
    const int r = e / dim, d = e % dim, j = min(j0 + r, last);
    K[r][d] = head_of(at.key, kv_head, p.kv_heads, dim)[j][d];
    V[r][d] = head_of(at.value, kv_head, p.kv_heads, dim)[j][d];
  }
  __syncthreads();
  // Rows that see any of the keys: their intervals begin and end later from row to row.
  const int begin = p.visible_end(0) > j0 || (!p.causal && p.window < 0)
                        ? 0
                        : min(p.seqlen_q, j0 - p.visible_end(0) + 1);
  const int end =
      p.window < 0 ? p.seqlen_q : max(begin, min(p.seqlen_q, last - p.visible_begin(0) + 1));
  const Share<dim> share;
  Real dk[Share<dim>::rows] = {}, dv[Share<dim>::rows] = {};
  for (int h = kv_head * p.group(); h < (kv_head + 1) * p.group(); ++h) {
    const Rows<const float> Q = head_of(at.query, h, p.query_heads, dim);
    const Rows<const float> dO = head_of(at.dout, h, p.query_heads, dim);
    const std::size_t table = static_cast<std::size_t>(h) * p.seqlen_q;
    const auto scaled = [&](int i, int d) { return Rule::round(Real(Q[i][d]) * scale); };
    Real dK[Share<dim>::rows] = {}, dV[Share<dim>::rows] = {};
    for (int c = begin; c < end; c += kThreads) {
      const int i = c + t, count = min(kThreads, end - c);
      Real w[kOwnRows] = {}, ds[kOwnRows] = {};
      if (i < end) {
        Real s[kOwnRows], dp[kOwnRows];
        dots<dim>(s, K, [&](int d) { return scaled(i, d); });
        dots<dim>(dp, V, [&](int d) { return Real(dO[i][d]); });
        for (int r = 0; r < kOwnRows; ++r) {
          if (!call.sees(i, j0 + r)) continue;
          const Real keep = call.keep<Real>(h, i, j0 + r);
          w[r] = Rule::round(exp(Rule::round(s[r]) - at.shift[table + i]) / at.total[table + i]);
          dp[r] = Rule::round(Rule::round(dp[r]) * keep);
          ds[r] = Rule::round(w[r] * (dp[r] - at.delta[table + i]));
          w[r] = Rule::round(w[r] * keep);
        }
      }
      for (int r = 0; r < kOwnRows; ++r) weights[r][t] = w[r];
      __syncthreads();
      accumulate<dim>(dV, weights, count, [&](int o, int d) { return Real(dO[c + o][d]); });
      __syncthreads();
      for (int r = 0; r < kOwnRows; ++r) weights[r][t] = ds[r];
      __syncthreads();
      accumulate<dim>(dK, weights, count, [&](int o, int d) { return scaled(c + o, d); });
      __syncthreads();
    }
    for (int n = 0; n < Share<dim>::rows; ++n) {
      dk[n] += Rule::round(dK[n]);
      dv[n] += Rule::round(dV[n]);
    }
  }
  for (int n = 0; n < Share<dim>::rows; ++n) {
    const int j = j0 + share.first + n * Share<dim>::groups;
    if (j > last) continue;
    head_of(at.dk, kv_head, p.kv_heads, dim)[j][share.d] = Rule::round(dk[n]);
    head_of(at.dv, kv_head, p.kv_heads, dim)[j][share.d] = Rule::round(dv[n]);
  }
}

}  // namespace plain
