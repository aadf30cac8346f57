// Vector types (float2 ... ulong4, vec<T, N>), their constructors, and the packed types.
// Relies on clang's ext_vector_type, whose element access, swizzles and arithmetic are those of
// Metal. Differs from Metal in one point: comparing two float vectors gives an int vector (all bits
// set for true), so boolN is intN.
#pragma once

#include "base.h"

#define METAL_SIM_VECTORS(T)                                                       \
  typedef T T##2 __attribute__((ext_vector_type(2)));                              \
  typedef T T##3 __attribute__((ext_vector_type(3)));                              \
  typedef T T##4 __attribute__((ext_vector_type(4)));                              \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));
METAL_SIM_VECTORS(float)
METAL_SIM_VECTORS(half)
METAL_SIM_VECTORS(bfloat)
METAL_SIM_VECTORS(char)
METAL_SIM_VECTORS(uchar)
METAL_SIM_VECTORS(short)
METAL_SIM_VECTORS(ushort)
METAL_SIM_VECTORS(int)
METAL_SIM_VECTORS(uint)
METAL_SIM_VECTORS(long)
METAL_SIM_VECTORS(ulong)
#undef METAL_SIM_VECTORS
typedef int2 bool2;
typedef int3 bool3;
typedef int4 bool4;

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}  // namespace metal

namespace metal_sim {

template <class V>
struct vector_traits {
  static constexpr bool is_vector = false;
};
template <class T, int N>
struct vector_traits<T __attribute__((ext_vector_type(N)))> {
  static constexpr bool is_vector = true;
  static constexpr int size = N;
  typedef T element;
};

template <class V, class A>
METAL_SIM_INLINE void append(V& v, int& next, A a) {
  typedef typename vector_traits<V>::element E;
  if constexpr (vector_traits<A>::is_vector) {
    for (int i = 0; i < vector_traits<A>::size; ++i) v[next++] = E(a[i]);
  } else {
    v[next++] = E(a);
  }
}

// floatN(...) after translation: a splat, a conversion, or a list of scalars and shorter vectors.
template <class V, class... Args>
METAL_SIM_INLINE V make(Args... args) {
  typedef typename vector_traits<V>::element E;
  V v = (V)(E(0));
  if constexpr (sizeof...(Args) == 1 && !(vector_traits<Args>::is_vector && ...)) {
    v = (V)(E(args), ...);
  } else {
    int next = 0;
    (append(v, next, args), ...);
  }
  return v;
}

}  // namespace metal_sim
