// The scalar and elementwise functions of namespace metal that kernels use.
// fast:: and precise:: are the same functions here: the simulated device rounds like the host's
// libm, so nothing in this folder says how large the error of Apple's fast functions is.
#pragma once

#include "vector.h"

namespace metal_sim {
METAL_SIM_RUNTIME float unary_math(abi::UnaryMath function, float x) {
  return runtime->unary_math(function, x);
}
METAL_SIM_RUNTIME float power(float x, float y) { return runtime->pow(x, y); }
}  // namespace metal_sim

namespace metal {

// Lifts a scalar function to vectors of any length.
#define METAL_SIM_ELEMENTWISE1(name)                  \
  template <class T, int N>                           \
  METAL_SIM_INLINE vec<T, N> name(vec<T, N> x) {      \
    vec<T, N> r;                                      \
    for (int i = 0; i < N; ++i) r[i] = name(T(x[i])); \
    return r;                                         \
  }
#define METAL_SIM_ELEMENTWISE2(name)                           \
  template <class T, int N>                                    \
  METAL_SIM_INLINE vec<T, N> name(vec<T, N> x, vec<T, N> y) {  \
    vec<T, N> r;                                               \
    for (int i = 0; i < N; ++i) r[i] = name(T(x[i]), T(y[i])); \
    return r;                                                  \
  }

// One-argument functions: computed in float, rounded to the argument's type.
#define METAL_SIM_UNARY(name, expression)                     \
  METAL_SIM_INLINE float name(float x) { return expression; } \
  METAL_SIM_INLINE half name(half value) {                    \
    const float x = float(value);                             \
    return half(expression);                                  \
  }                                                           \
  METAL_SIM_INLINE bfloat name(bfloat value) {                \
    const float x = float(value);                             \
    return bfloat(expression);                                \
  }                                                           \
  METAL_SIM_ELEMENTWISE1(name)
METAL_SIM_UNARY(exp, metal_sim::unary_math(metal_sim::abi::UnaryMath::kExp, x))
METAL_SIM_UNARY(exp2, metal_sim::unary_math(metal_sim::abi::UnaryMath::kExp2, x))
METAL_SIM_UNARY(log, metal_sim::unary_math(metal_sim::abi::UnaryMath::kLog, x))
METAL_SIM_UNARY(log2, metal_sim::unary_math(metal_sim::abi::UnaryMath::kLog2, x))
METAL_SIM_UNARY(tanh, metal_sim::unary_math(metal_sim::abi::UnaryMath::kTanh, x))
METAL_SIM_UNARY(sin, metal_sim::unary_math(metal_sim::abi::UnaryMath::kSin, x))
METAL_SIM_UNARY(cos, metal_sim::unary_math(metal_sim::abi::UnaryMath::kCos, x))
METAL_SIM_UNARY(sqrt, __builtin_sqrtf(x))
METAL_SIM_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))
METAL_SIM_UNARY(fabs, __builtin_fabsf(x))
METAL_SIM_UNARY(floor, __builtin_floorf(x))
METAL_SIM_UNARY(ceil, __builtin_ceilf(x))
METAL_SIM_UNARY(rint, __builtin_rintf(x))
METAL_SIM_UNARY(trunc, __builtin_truncf(x))
METAL_SIM_UNARY(abs, __builtin_fabsf(x))
#undef METAL_SIM_UNARY

// Minimum and maximum. For floating point a NaN argument loses, as in Metal's fmin and fmax.
#define METAL_SIM_ORDER(T, less_of, greater_of)           \
  METAL_SIM_INLINE T min(T a, T b) { return less_of; }    \
  METAL_SIM_INLINE T max(T a, T b) { return greater_of; } \
  METAL_SIM_INLINE T clamp(T x, T low, T high) { return min(max(x, low), high); }
#define METAL_SIM_ORDER_INTEGER(T) METAL_SIM_ORDER(T, b < a ? b : a, a < b ? b : a)
METAL_SIM_ORDER_INTEGER(int)
METAL_SIM_ORDER_INTEGER(uint)
METAL_SIM_ORDER_INTEGER(long)
METAL_SIM_ORDER_INTEGER(ulong)
METAL_SIM_ORDER_INTEGER(short)
METAL_SIM_ORDER_INTEGER(ushort)
METAL_SIM_ORDER_INTEGER(char)
METAL_SIM_ORDER_INTEGER(uchar)
METAL_SIM_ORDER(float, (b < a || a != a) ? b : a, (a < b || a != a) ? b : a)
METAL_SIM_ORDER(half, (b < a || a != a) ? b : a, (a < b || a != a) ? b : a)
METAL_SIM_ORDER(bfloat, (b < a || a != a) ? b : a, (a < b || a != a) ? b : a)
#undef METAL_SIM_ORDER_INTEGER
#undef METAL_SIM_ORDER
METAL_SIM_ELEMENTWISE2(min)
METAL_SIM_ELEMENTWISE2(max)
METAL_SIM_INLINE float fmin(float a, float b) { return min(a, b); }
METAL_SIM_INLINE float fmax(float a, float b) { return max(a, b); }
METAL_SIM_INLINE half fmin(half a, half b) { return min(a, b); }
METAL_SIM_INLINE half fmax(half a, half b) { return max(a, b); }
METAL_SIM_INLINE int abs(int x) { return x < 0 ? -x : x; }
METAL_SIM_INLINE uint mulhi(uint a, uint b) { return uint((ulong(a) * b) >> 32); }
METAL_SIM_INLINE uint popcount(uint x) { return uint(__builtin_popcount(x)); }
METAL_SIM_INLINE uint clz(uint x) { return x == 0 ? 32u : uint(__builtin_clz(x)); }
METAL_SIM_INLINE uint ctz(uint x) { return x == 0 ? 32u : uint(__builtin_ctz(x)); }
METAL_SIM_INLINE uint rotate(uint x, uint n) { return (x << (n & 31)) | (x >> ((32 - n) & 31)); }

METAL_SIM_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
METAL_SIM_INLINE half fma(half a, half b, half c) {
  return half(__builtin_fmaf(float(a), float(b), float(c)));
}
template <int N>
METAL_SIM_INLINE vec<float, N> fma(vec<float, N> a, vec<float, N> b, vec<float, N> c) {
  vec<float, N> r;
  for (int i = 0; i < N; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
}
METAL_SIM_INLINE float pow(float x, float y) { return metal_sim::power(x, y); }
METAL_SIM_INLINE float powr(float x, float y) { return metal_sim::power(x, y); }
METAL_SIM_INLINE float divide(float x, float y) { return x / y; }
METAL_SIM_INLINE float ldexp(float x, int n) {
  // Three exact factors reach every exponent; only the last product can round.
  const int third = n < -381 ? -127 : n > 381 ? 127 : n / 3;
  const int rest = n < -381 ? -127 : n > 381 ? 127 : n - 2 * third;
  const auto power_of_two = [](int e) {
    const float halves = __builtin_bit_cast(float, (uint(e / 2) + 127u) << 23);
    return halves * __builtin_bit_cast(float, (uint(e - e / 2) + 127u) << 23);
  };
  return x * power_of_two(third) * power_of_two(third) * power_of_two(rest);
}
METAL_SIM_INLINE float copysign(float x, float y) { return __builtin_copysignf(x, y); }
METAL_SIM_INLINE float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f; }

// Tests on bits: an optimiser told to assume finite values could not remove them.
METAL_SIM_INLINE bool isnan(float x) { return __builtin_isnan(x); }
METAL_SIM_INLINE bool isinf(float x) { return __builtin_isinf(x); }
METAL_SIM_INLINE bool isfinite(float x) { return __builtin_isfinite(x); }
METAL_SIM_INLINE bool isnan(half x) { return __builtin_isnan(float(x)); }
METAL_SIM_INLINE bool isfinite(half x) { return __builtin_isfinite(float(x)); }
METAL_SIM_INLINE bool isnan(bfloat x) { return __builtin_isnan(float(x)); }
METAL_SIM_INLINE bool isfinite(bfloat x) { return __builtin_isfinite(float(x)); }

// select(a, b, c): b where c is true.
template <class T>
METAL_SIM_INLINE T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, int N>
METAL_SIM_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<int, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = c[i] ? b[i] : a[i];
  return r;
}
template <class T, int N>
METAL_SIM_INLINE bool any(vec<T, N> x) {
  bool r = false;
  for (int i = 0; i < N; ++i) r = r || x[i];
  return r;
}
template <class T, int N>
METAL_SIM_INLINE bool all(vec<T, N> x) {
  bool r = true;
  for (int i = 0; i < N; ++i) r = r && x[i];
  return r;
}
template <class T, int N>
METAL_SIM_INLINE T dot(vec<T, N> a, vec<T, N> b) {
  T sum = T(a[0] * b[0]);
  for (int i = 1; i < N; ++i) sum = T(sum + a[i] * b[i]);
  return sum;
}

#define METAL_SIM_VARIANT(ns) \
  namespace ns {              \
  using metal::abs;           \
  using metal::clamp;         \
  using metal::cos;           \
  using metal::divide;        \
  using metal::exp;           \
  using metal::exp2;          \
  using metal::fma;           \
  using metal::fmax;          \
  using metal::fmin;          \
  using metal::log;           \
  using metal::log2;          \
  using metal::max;           \
  using metal::min;           \
  using metal::pow;           \
  using metal::powr;          \
  using metal::rsqrt;         \
  using metal::sin;           \
  using metal::sqrt;          \
  using metal::tanh;          \
  }
METAL_SIM_VARIANT(fast)
METAL_SIM_VARIANT(precise)
#undef METAL_SIM_VARIANT

}  // namespace metal

// Reinterprets the bits; global, as in Metal.
template <class T, class U>
METAL_SIM_INLINE T as_type(U value) {
  static_assert(sizeof(T) == sizeof(U), "as_type needs types of one size");
  T result;
  __builtin_memcpy(&result, &value, sizeof(T));
  return result;
}
namespace metal {
using ::as_type;
}  // namespace metal
