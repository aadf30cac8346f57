// Declarations, without bodies, of what shaders use from the Metal standard library, in C++ for
// OpenCL, whose address spaces are those of Metal under other names. Only types are checked against
// this file: nothing is ever run. check.py defines device, threadgroup, constant and thread as
// OpenCL qualifiers before including it.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable
#pragma OPENCL EXTENSION __cl_clang_variadic_functions : enable
#pragma OPENCL EXTENSION __cl_clang_non_portable_kernel_param_types : enable

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;

// A class of its own, so that overloads on it are told from those on half and ushort.
struct bfloat {
  ushort bits;
  bfloat() = default;
  explicit bfloat(float);
  operator float() const;
};

#define MSL_VECTORS(T)                                \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4))); \
  typedef T##2 packed_##T##2;                         \
  typedef T##4 packed_##T##4;
MSL_VECTORS(float)
MSL_VECTORS(half)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define FLT_MAX 3.40282347e+38f
#define FLT_MIN 1.17549435e-38f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f

template <class T, class U>
T as_type(U value);
template <class T>
bool is_function_constant_defined(T value);

namespace metal {

using ::as_type;

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

// OpenCL has types of these names.
#define atomic_uint msl_atomic_uint
#define memory_order msl_memory_order
#define memory_order_relaxed msl_memory_order_relaxed
#define atomic_store_explicit msl_atomic_store_explicit
enum memory_order { memory_order_relaxed };
struct atomic_uint {
  uint value;
};
void atomic_store_explicit(device atomic_uint* object, uint value, memory_order order);

enum class mem_flags : int { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
mem_flags operator|(mem_flags a, mem_flags b);
void threadgroup_barrier(mem_flags flags);
void simdgroup_barrier(mem_flags flags);

#define MSL_UNARY(name)  \
  float name(float x);   \
  half name(half x);     \
  float2 name(float2 x); \
  float4 name(float4 x);
// clang-format off: it never settles on a layout for this list.
#define MSL_FLOAT_FUNCTIONS \
  MSL_UNARY(exp) MSL_UNARY(exp2) MSL_UNARY(log) MSL_UNARY(log2) MSL_UNARY(sqrt) \
  MSL_UNARY(rsqrt) MSL_UNARY(fabs) MSL_UNARY(abs) MSL_UNARY(tanh) MSL_UNARY(floor) \
  MSL_UNARY(ceil) MSL_UNARY(rint) MSL_UNARY(trunc) MSL_UNARY(sin) MSL_UNARY(cos) \
  float pow(float x, float y); \
  float fma(float a, float b, float c); \
  float ldexp(float x, int n); \
  float copysign(float x, float y); \
  float fmax(float a, float b); \
  float fmin(float a, float b);
// clang-format on
MSL_FLOAT_FUNCTIONS
namespace fast {
MSL_FLOAT_FUNCTIONS
}
namespace precise {
MSL_FLOAT_FUNCTIONS
}

#define MSL_ORDER(T) \
  T min(T a, T b);   \
  T max(T a, T b);   \
  T clamp(T x, T a, T b);
MSL_ORDER(float)
MSL_ORDER(half)
MSL_ORDER(int)
MSL_ORDER(uint)
MSL_ORDER(short)
MSL_ORDER(ushort)
MSL_ORDER(long)
MSL_ORDER(ulong)
MSL_ORDER(float2)
MSL_ORDER(float4)
int abs(int x);
uint mulhi(uint a, uint b);
uint popcount(uint x);
uint clz(uint x);
uint ctz(uint x);
uint rotate(uint x, uint n);
bool isnan(float x);
bool isinf(float x);
bool isfinite(float x);
template <class T>
T select(T a, T b, bool c);
float dot(float2 a, float2 b);
float dot(float4 a, float4 b);

template <class T>
T simd_sum(T x);
template <class T>
T simd_max(T x);
template <class T>
T simd_min(T x);
template <class T>
T simd_shuffle(T x, ushort lane);
template <class T>
T simd_shuffle_xor(T x, ushort mask);
template <class T>
T simd_shuffle_down(T x, ushort delta);
template <class T>
T simd_shuffle_up(T x, ushort delta);
template <class T>
T simd_broadcast(T x, ushort lane);
template <class T>
T simd_broadcast_first(T x);
bool simd_any(bool x);
bool simd_all(bool x);

// thread_elements() returns something indexable, whatever the element type.
template <class T>
struct MatrixElements {
  T element[2];
  T& operator[](int i);
};
template <class T, int rows, int columns>
struct simdgroup_matrix {
  MatrixElements<T> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  MatrixElements<T>& thread_elements();
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int rows, int columns>
simdgroup_matrix<T, rows, columns> make_filled_simdgroup_matrix(T value);

// The two address spaces a matrix may be loaded from and stored to.
template <class T>
void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& d, device const T* source, ulong stride = 8,
                    ulong2 origin = 0, bool transpose = false);
template <class T>
void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& d, threadgroup const T* source,
                    ulong stride = 8, ulong2 origin = 0, bool transpose = false);
template <class T>
void simdgroup_store(simdgroup_matrix<T, 8, 8> a, device T* target, ulong stride = 8,
                     ulong2 origin = 0, bool transpose = false);
template <class T>
void simdgroup_store(simdgroup_matrix<T, 8, 8> a, threadgroup T* target, ulong stride = 8,
                     ulong2 origin = 0, bool transpose = false);
template <class D, class A, class B>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<D, 8, 8> c);
template <class D, class A, class B>
void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                        simdgroup_matrix<B, 8, 8> b);

}  // namespace metal
