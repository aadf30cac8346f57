// The Metal standard library for translated shaders on an NVIDIA GPU: a simdgroup is a warp, an 8x8
// matrix is spread over its lanes by METAL_CUDA_MAP (0 row-major, 1 as observed on Apple GPUs, n >=
// 2 an affine scramble). Included by every unit, once. It serves checking, not speed: a multiply is
// made of shuffles.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "registry.h"

#ifndef METAL_CUDA_MAP
#define METAL_CUDA_MAP 1
#endif
#ifndef METAL_CUDA_CONSTANTS
#define METAL_CUDA_CONSTANTS 0
#endif

#define METAL_CUDA_DEVICE __device__ __forceinline__
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

namespace metal_cuda {

// Bit n of METAL_CUDA_CONSTANTS is function constant n: yes/no features are all there is.
template <class T>
constexpr T function_constant(int index) {
  return T((METAL_CUDA_CONSTANTS >> index) & 1);
}

struct Pointer {
  void* pointer;
  template <class T>
  METAL_CUDA_DEVICE operator T*() const {
    return static_cast<T*>(pointer);
  }
};
struct Index {
  unsigned value;
  METAL_CUDA_DEVICE operator uint() const { return value; }
  METAL_CUDA_DEVICE operator ushort() const { return static_cast<ushort>(value); }
};
template <class Triple>
METAL_CUDA_DEVICE Index position(const Triple& p) {
  return Index{p.x};
}

METAL_CUDA_DEVICE unsigned lane() { return threadIdx.x & 31u; }

// (lane, element) -> row * 8 + column, and back. Closed forms: a search loop made ptxas run for
// minutes.
METAL_CUDA_DEVICE unsigned place_of(unsigned lane, unsigned element) {
#if METAL_CUDA_MAP == 0
  return lane * 2 + element;
#elif METAL_CUDA_MAP == 1
  const unsigned row = ((lane / 4) & 4) + (lane / 2) % 4;
  return row * 8 + ((lane / 4) & 2) * 2 + (lane % 2) * 2 + element;
#else
  return ((lane * 2 + element) * (2 * METAL_CUDA_MAP + 1) + 7 * METAL_CUDA_MAP) & 63;
#endif
}
METAL_CUDA_DEVICE unsigned holder_of(unsigned place) {  // lane * 2 + element
#if METAL_CUDA_MAP == 0
  return place;
#elif METAL_CUDA_MAP == 1
  const unsigned row = place / 8, column = place % 8;
  const unsigned lane = ((row & 4) + ((column / 2) & 2)) * 4 + (row & 3) * 2 + ((column / 2) & 1);
  return lane * 2 + (column & 1);
#else
  // Newton's iteration for the inverse of the odd factor modulo 64.
  constexpr unsigned factor = 2 * METAL_CUDA_MAP + 1;
  constexpr unsigned x0 = factor * (2 - factor * factor);
  constexpr unsigned x1 = x0 * (2 - factor * x0);
  constexpr unsigned inverse = x1 * (2 - factor * x1);
  static_assert(((factor * inverse) & 63) == 1, "not the inverse");
  return ((place - 7 * METAL_CUDA_MAP) * inverse) & 63;
#endif
}

}  // namespace metal_cuda

namespace metal {

// Vectors with the members that shaders name.
template <class T, int N>
struct vec_members {
  T element[N];
};
template <class T>
struct vec_members<T, 2> {
  union {
    T element[2];
    struct {
      T x, y;
    };
  };
};
template <class T>
struct vec_members<T, 4> {
  union {
    T element[4];
    struct {
      T x, y, z, w;
    };
  };
};
template <class T, int N>
struct vec : vec_members<T, N> {
  using vec_members<T, N>::element;
  vec() = default;
  METAL_CUDA_DEVICE explicit vec(T x) {
#pragma unroll
    for (int i = 0; i < N; ++i) element[i] = x;
  }
  template <class... Rest>
  METAL_CUDA_DEVICE vec(T first, T second, Rest... rest) {
    const T values[N] = {first, second, T(rest)...};
#pragma unroll
    for (int i = 0; i < N; ++i) element[i] = values[i];
  }
  METAL_CUDA_DEVICE T& operator[](int i) { return element[i]; }
  METAL_CUDA_DEVICE const T& operator[](int i) const { return element[i]; }
};

// As they lie in device memory, aligned like their elements.
template <class T>
struct packed4 {
  T element[4];
  METAL_CUDA_DEVICE operator vec<T, 4>() const {
    return vec<T, 4>(element[0], element[1], element[2], element[3]);
  }
};

// Relaxed stores to status words are all that shaders do with atomics.
struct atomic_uint {
  uint value;
};
enum memory_order { memory_order_relaxed };
METAL_CUDA_DEVICE void atomic_store_explicit(atomic_uint* target, uint value, memory_order) {
  atomicExch(&target->value, value);
}

enum class mem_flags : int { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
METAL_CUDA_DEVICE mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(int(a) | int(b));
}
METAL_CUDA_DEVICE void threadgroup_barrier(mem_flags) { __syncthreads(); }
METAL_CUDA_DEVICE void simdgroup_barrier(mem_flags) { __syncwarp(); }

#define METAL_CUDA_ORDER(T)                                   \
  METAL_CUDA_DEVICE T min(T a, T b) { return b < a ? b : a; } \
  METAL_CUDA_DEVICE T max(T a, T b) { return a < b ? b : a; } \
  METAL_CUDA_DEVICE T clamp(T x, T low, T high) { return min(max(x, low), high); }
METAL_CUDA_ORDER(int)
METAL_CUDA_ORDER(uint)
METAL_CUDA_ORDER(long)
METAL_CUDA_ORDER(ulong)
METAL_CUDA_DEVICE float min(float a, float b) { return fminf(a, b); }
METAL_CUDA_DEVICE float max(float a, float b) { return fmaxf(a, b); }
METAL_CUDA_DEVICE float clamp(float x, float low, float high) { return min(max(x, low), high); }
METAL_CUDA_DEVICE float exp(float x) { return expf(x); }
METAL_CUDA_DEVICE float exp2(float x) { return exp2f(x); }
METAL_CUDA_DEVICE float log(float x) { return logf(x); }
METAL_CUDA_DEVICE float log2(float x) { return log2f(x); }
METAL_CUDA_DEVICE float tanh(float x) { return tanhf(x); }
METAL_CUDA_DEVICE float sqrt(float x) { return sqrtf(x); }
METAL_CUDA_DEVICE float abs(float x) { return fabsf(x); }
METAL_CUDA_DEVICE float fabs(float x) { return fabsf(x); }
METAL_CUDA_DEVICE float fma(float a, float b, float c) { return fmaf(a, b, c); }
METAL_CUDA_DEVICE bool isfinite(float x) { return fabsf(x) <= FLT_MAX; }
METAL_CUDA_DEVICE bool isnan(float x) { return x != x; }
METAL_CUDA_DEVICE float select(float a, float b, bool c) { return c ? b : a; }
METAL_CUDA_DEVICE uint mulhi(uint a, uint b) { return __umulhi(a, b); }
METAL_CUDA_DEVICE uint popcount(uint x) { return uint(__popc(x)); }
namespace fast {
using metal::exp;
using metal::exp2;
using metal::log;
using metal::log2;
using metal::tanh;
}  // namespace fast
namespace precise {
using metal::exp;
using metal::exp2;
using metal::log;
using metal::log2;
using metal::tanh;
}  // namespace precise

template <class T, class U>
METAL_CUDA_DEVICE T as_type(U value) {
  static_assert(sizeof(T) == sizeof(U), "as_type needs types of one size");
  T result;
  memcpy(&result, &value, sizeof(T));
  return result;
}

constexpr unsigned kAllLanes = 0xffffffffu;
template <class T>
METAL_CUDA_DEVICE T simd_shuffle(T x, unsigned lane) {
  return __shfl_sync(kAllLanes, x, lane);
}
template <class T>
METAL_CUDA_DEVICE T simd_broadcast(T x, unsigned lane) {
  return __shfl_sync(kAllLanes, x, lane);
}
template <class T>
METAL_CUDA_DEVICE T simd_broadcast_first(T x) {
  return __shfl_sync(kAllLanes, x, 0);
}
template <class T>
METAL_CUDA_DEVICE T simd_shuffle_xor(T x, unsigned mask) {
  return __shfl_xor_sync(kAllLanes, x, mask);
}
template <class T>
METAL_CUDA_DEVICE T simd_shuffle_down(T x, unsigned delta) {
  return __shfl_down_sync(kAllLanes, x, delta);
}
template <class T>
METAL_CUDA_DEVICE T simd_sum(T x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}
template <class T>
METAL_CUDA_DEVICE T simd_max(T x) {
  for (int step = 16; step > 0; step /= 2) x = max(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}
METAL_CUDA_DEVICE bool simd_any(bool x) { return __any_sync(kAllLanes, x) != 0; }
METAL_CUDA_DEVICE bool simd_all(bool x) { return __all_sync(kAllLanes, x) != 0; }

template <class T, int rows, int columns>
struct simdgroup_matrix {
  vec<T, 2> elements;
  // Undefined in Metal: NaN, so that a use of it shows.
  METAL_CUDA_DEVICE simdgroup_matrix() {
    elements[0] = elements[1] = T(__int_as_float(0x7fc00000));
  }
  METAL_CUDA_DEVICE vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<__half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<__nv_bfloat16, 8, 8> simdgroup_bfloat8x8;

template <class T, int rows, int columns>
METAL_CUDA_DEVICE simdgroup_matrix<T, rows, columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, rows, columns> m;
  m.elements[0] = m.elements[1] = value;
  return m;
}
template <class T>
METAL_CUDA_DEVICE void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const T* source,
                                      ulong stride = 8, vec<ulong, 2> origin = vec<ulong, 2>(0ul),
                                      bool transpose = false) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const unsigned place = metal_cuda::place_of(metal_cuda::lane(), e);
    const unsigned row = transpose ? place % 8 : place / 8;
    const unsigned column = transpose ? place / 8 : place % 8;
    d.elements[e] = source[(origin[1] + row) * stride + origin[0] + column];
  }
}
template <class T>
METAL_CUDA_DEVICE void simdgroup_store(simdgroup_matrix<T, 8, 8> d, T* target, ulong stride = 8,
                                       vec<ulong, 2> origin = vec<ulong, 2>(0ul),
                                       bool transpose = false) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const unsigned place = metal_cuda::place_of(metal_cuda::lane(), e);
    const unsigned row = transpose ? place % 8 : place / 8;
    const unsigned column = transpose ? place / 8 : place % 8;
    target[(origin[1] + row) * stride + origin[0] + column] = d.elements[e];
  }
}

// The element of a matrix at `place`, for every lane its own place.
METAL_CUDA_DEVICE float element_at(float first, float second, unsigned place) {
  const unsigned holder = metal_cuda::holder_of(place);
  const float a = __shfl_sync(kAllLanes, first, holder >> 1);
  const float b = __shfl_sync(kAllLanes, second, holder >> 1);
  return (holder & 1u) != 0u ? b : a;
}

// Products and sums in float, whatever the element types.
template <class D, class A, class B, class C>
METAL_CUDA_DEVICE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                                     simdgroup_matrix<A, 8, 8> a,
                                                     simdgroup_matrix<B, 8, 8> b,
                                                     simdgroup_matrix<C, 8, 8> c) {
  float result[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const unsigned place = metal_cuda::place_of(metal_cuda::lane(), e);
    float sum = float(c.elements[e]);
#pragma unroll
    for (unsigned k = 0; k < 8; ++k) {
      const float left = element_at(float(a.elements[0]), float(a.elements[1]), (place & 56u) + k);
      const float right =
          element_at(float(b.elements[0]), float(b.elements[1]), k * 8 + (place & 7u));
      sum = fmaf(left, right, sum);
    }
    result[e] = sum;
  }
  d.elements[0] = D(result[0]);
  d.elements[1] = D(result[1]);
}
template <class D, class A, class B>
METAL_CUDA_DEVICE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                          simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0.0f)));
}

}  // namespace metal

using metal::as_type;

// Inside a unit's namespace these hide CUDA's own vector types and functions.
#define METAL_CUDA_TYPES                  \
  using half = __half;                    \
  using bfloat = __nv_bfloat16;           \
  using float2 = vec<float, 2>;           \
  using float4 = vec<float, 4>;           \
  using half4 = vec<half, 4>;             \
  using ushort4 = vec<ushort, 4>;         \
  using uint2 = vec<uint, 2>;             \
  using uint4 = vec<uint, 4>;             \
  using ulong2 = vec<ulong, 2>;           \
  using packed_float4 = packed4<float>;   \
  using packed_half4 = packed4<half>;     \
  using packed_ushort4 = packed4<ushort>; \
  using metal::abs;                       \
  using metal::clamp;                     \
  using metal::exp;                       \
  using metal::exp2;                      \
  using metal::fabs;                      \
  using metal::fma;                       \
  using metal::isfinite;                  \
  using metal::isnan;                     \
  using metal::log;                       \
  using metal::log2;                      \
  using metal::max;                       \
  using metal::min;                       \
  using metal::sqrt;                      \
  using metal::tanh;
