// MSL for the register proxy: translated kernels compiled to PTX, for whose registers ptxas has a
// real allocator. Matrix operations and exchanges are opaque assembly on a lane's pair of elements,
// so that only operands and results count. Nothing here is ever run.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef _Float16 half;

#define PROXY inline __attribute__((always_inline))
#define PROXY_VECTORS(T)                                                           \
  typedef T T##2 __attribute__((ext_vector_type(2)));                              \
  typedef T T##3 __attribute__((ext_vector_type(3)));                              \
  typedef T T##4 __attribute__((ext_vector_type(4)));                              \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));
PROXY_VECTORS(float)
PROXY_VECTORS(half)
PROXY_VECTORS(uchar)
PROXY_VECTORS(short)
PROXY_VECTORS(ushort)
PROXY_VECTORS(int)
PROXY_VECTORS(uint)
PROXY_VECTORS(ulong)

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define FLT_MAX 3.40282347e+38f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f

namespace metal_sim {
template <class T, uint32_t index>
struct FunctionConstant {};

// Arrays of a kernel at places of their own in local memory: site 1, 2, ...
template <class T, size_t alignment>
PROXY T& threadgroup_array(uint32_t site, const char*) {
  typedef __attribute__((address_space(3))) char* Local;
  return *(T*)(char*)(Local)(0x1000u * site);
}
PROXY void declarations_end() {}
template <class V, class... Args>
PROXY V make(Args... args) {
  return V{static_cast<decltype(V{}[0])>(args)...};
}
template <class V, class A>
PROXY V make(A splat) {
  return V(static_cast<decltype(+V{}[0])>(splat));
}
template <class V, class T, int N>
PROXY V make(T __attribute__((ext_vector_type(N))) other) {
  return __builtin_convertvector(other, V);
}
}  // namespace metal_sim

template <class T, class U>
PROXY T as_type(U value) {
  T result;
  __builtin_memcpy(&result, &value, sizeof(T));
  return result;
}

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
enum memory_order { memory_order_relaxed };
struct atomic_uint {
  uint value;
};
PROXY void atomic_store_explicit(atomic_uint* object, uint value, memory_order) {
  *(volatile uint*)&object->value = value;
}
enum class mem_flags : int { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
PROXY void threadgroup_barrier(mem_flags) { asm volatile("bar.sync 0;" ::: "memory"); }
PROXY void simdgroup_barrier(mem_flags) { asm volatile("bar.warp.sync -1;" ::: "memory"); }

#define PROXY_ORDER(T)                            \
  PROXY T min(T a, T b) { return b < a ? b : a; } \
  PROXY T max(T a, T b) { return a < b ? b : a; } \
  PROXY T clamp(T x, T low, T high) { return min(max(x, low), high); }
PROXY_ORDER(int)
PROXY_ORDER(uint)
PROXY float min(float a, float b) { return __builtin_fminf(a, b); }
PROXY float max(float a, float b) { return __builtin_fmaxf(a, b); }
PROXY float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
PROXY float abs(float x) { return __builtin_fabsf(x); }
PROXY float fabs(float x) { return __builtin_fabsf(x); }
PROXY int abs(int x) { return x < 0 ? -x : x; }
PROXY uint mulhi(uint a, uint b) { return uint((ulong(a) * b) >> 32); }
PROXY float exp2(float x) { return __nvvm_ex2_approx_f(x); }
PROXY float log2(float x) { return __nvvm_lg2_approx_f(x); }
PROXY float exp(float x) { return exp2(x * M_LOG2E_F); }
PROXY float log(float x) { return log2(x) * M_LN2_F; }
PROXY float tanh(float x) { return 1.0f - 2.0f / (1.0f + exp(2.0f * x)); }
PROXY bool isfinite(float x) { return __builtin_isfinite(x); }
PROXY bool isnan(float x) { return __builtin_isnan(x); }
namespace fast {
using metal::exp;
using metal::exp2;
using metal::tanh;
}  // namespace fast
namespace precise {
using metal::exp;
using metal::exp2;
using metal::tanh;
}  // namespace precise

PROXY float simd_shuffle_xor(float value, ushort mask) {
  float result;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, -1;"
               : "=f"(result)
               : "f"(value), "r"(uint(mask)));
  return result;
}
PROXY float simd_shuffle(float value, ushort lane) {
  float result;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, -1;"
               : "=f"(result)
               : "f"(value), "r"(uint(lane)));
  return result;
}
PROXY bool simd_any(bool value) {
  uint result;
  asm volatile(
      "{.reg .pred p, q; setp.ne.u32 p, %1, 0; vote.sync.any.pred q, p, -1; selp.u32 %0, 1, 0, q;}"
      : "=r"(result)
      : "r"(uint(value)));
  return result != 0u;
}
PROXY bool simd_all(bool value) { return !simd_any(!value); }

// A fragment is a pair: two registers in float, one in half.
template <class T, int rows, int columns>
struct simdgroup_matrix {
  typedef vec<T, 2> storage_type;
  storage_type elements;
  PROXY storage_type& thread_elements() { return elements; }
  PROXY const storage_type& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
template <class T, int rows, int columns>
PROXY simdgroup_matrix<T, rows, columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, rows, columns> m;
  m.elements = value;
  return m;
}
// One address for the pair, which the lane has to hold: Apple's layout.
PROXY uint lane_number() {
  uint lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
PROXY uint pair_offset(uint stride, bool transpose) {
  const uint lane = lane_number();
  const uint row = ((lane & 16u) >> 2) | ((lane >> 1) & 3u);
  const uint column = ((lane & 8u) >> 1) | ((lane & 1u) << 1);
  return transpose ? column * stride + row : row * stride + column;
}
template <class T>
PROXY void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const T* source, ulong stride = 8,
                          ulong2 = ulong2(0), bool transpose = false) {
  const volatile T* at = source + pair_offset(uint(stride), transpose);
  d.elements[0] = at[0];
  d.elements[1] = at[transpose ? uint(stride) : 1u];
}
template <class T>
PROXY void simdgroup_store(simdgroup_matrix<T, 8, 8> d, T* target, ulong stride = 8,
                           ulong2 = ulong2(0), bool transpose = false) {
  volatile T* at = target + pair_offset(uint(stride), transpose);
  at[0] = d.elements[0];
  at[transpose ? uint(stride) : 1u] = d.elements[1];
}

PROXY void multiply_add(float2& d, float2 a, float2 b) {
  float x = d[0], y = d[1];
  asm volatile("fma.rn.f32 %0, %2, %4, %0;\n\tfma.rn.f32 %1, %3, %5, %1;"
               : "+f"(x), "+f"(y)
               : "f"(a[0]), "f"(a[1]), "f"(b[0]), "f"(b[1]));
  d = float2{x, y};
}
PROXY void multiply_add(float2& d, half2 a, half2 b) {
  uint x = as_type<uint>(float(d[0])), y = as_type<uint>(float(d[1]));
  asm volatile("mad.lo.u32 %0, %2, %3, %0;\n\tmad.hi.u32 %1, %2, %3, %1;"
               : "+r"(x), "+r"(y)
               : "r"(as_type<uint>(a)), "r"(as_type<uint>(b)));
  d = float2{as_type<float>(x), as_type<float>(y)};
}
template <class A>
PROXY void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8>& d,
                                         simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<A, 8, 8> b,
                                         simdgroup_matrix<float, 8, 8> c) {
  d.elements = c.elements;
  multiply_add(d.elements, a.elements, b.elements);
}
template <class A>
PROXY void simdgroup_multiply(simdgroup_matrix<float, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                              simdgroup_matrix<A, 8, 8> b) {
  d.elements = float2{0.0f, 0.0f};
  multiply_add(d.elements, a.elements, b.elements);
}
}  // namespace metal
