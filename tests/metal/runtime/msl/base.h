// Scalar types of the Metal Shading Language, and access to the runtime from a freestanding kernel
// module. Relies on clang's _Float16, __bf16 and vector extensions. Address spaces do not exist
// here: the translator drops the qualifiers, and tests/metal/address_space checks them separately.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../kernel_abi.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define HUGE_VALF (__builtin_huge_valf())
#define FLT_MAX 3.40282347e+38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920929e-7f
#define HALF_MAX half(65504.0f)
#define UINT_MAX 0xffffffffu
#define INT_MAX 0x7fffffff
#define INT_MIN (-0x7fffffff - 1)
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_PI_F 3.14159265358979323846f
#define M_SQRT2_F 1.41421356237309504880f
#define METAL_FUNC inline

// Inlined everywhere, so that the debug line of a memory access inside is still the caller's
// statement in -O1 code.
#define METAL_SIM_INLINE inline __attribute__((always_inline, nodebug))
// Operations of a whole simdgroup: calls, not code, where a kernel's own instructions are counted
// (cost_model/).
#ifdef METAL_SIM_COUNT
#define METAL_SIM_COLLECTIVE inline __attribute__((noinline))
#else
#define METAL_SIM_COLLECTIVE METAL_SIM_INLINE
#endif
// Kept out of line and uninstrumented: the body touches the simulator's memory, not the kernel's.
#define METAL_SIM_RUNTIME inline __attribute__((noinline, no_sanitize("thread")))
// Unpacks arguments; reads the simulator's memory.
#define METAL_SIM_THUNK static __attribute__((noinline, no_sanitize("thread")))
// The one exported function; sets the pointer that the hooks call through, so it must not be hooked
// itself.
#define METAL_SIM_ENTRY extern "C" __attribute__((visibility("default"), no_sanitize("thread")))
// The caller's file and line, as default arguments of every collective operation.
#define METAL_SIM_SOURCE \
  const char *source_file = __builtin_FILE(), int source_line = __builtin_LINE()
#define METAL_SIM_HERE \
  ::metal_sim::abi::Source { source_file, source_line }

namespace metal_sim {

// Set by metal_sim_module(). Hidden: every module has its own.
extern const abi::Runtime* runtime __attribute__((visibility("hidden")));

template <bool condition, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <class T>
struct is_const {
  static constexpr bool value = false;
};
template <class T>
struct is_const<const T> {
  static constexpr bool value = true;
};

// `constant T name [[function_constant(n)]]`: an object without state, read through the runtime.
// The attribute lets the optimiser hoist the call: a constant cannot change while a kernel runs.
METAL_SIM_RUNTIME __attribute__((const)) uint64_t constant_bits(uint32_t index) {
  return runtime->constant(index);
}
METAL_SIM_RUNTIME __attribute__((const)) bool constant_defined(uint32_t index) {
  return runtime->constant_defined(index);
}
template <class T, uint32_t index>
struct FunctionConstant {
  static_assert(sizeof(T) <= 8, "function constants of the simulated device have at most 8 bytes");
  METAL_SIM_INLINE operator T() const {
    const uint64_t bits = constant_bits(index);
    T value;
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
  }
};

// A threadgroup array or variable declared in a kernel.
METAL_SIM_RUNTIME void* threadgroup_storage(uint32_t site, size_t bytes, size_t alignment,
                                            const char* name) {
  return runtime->threadgroup_array(site, bytes, alignment, name);
}
template <class T, size_t alignment>
METAL_SIM_INLINE T& threadgroup_array(uint32_t site, const char* name) {
  constexpr size_t natural = alignof(T);
  return *reinterpret_cast<T*>(
      threadgroup_storage(site, sizeof(T), alignment > natural ? alignment : natural, name));
}
METAL_SIM_RUNTIME void declarations_end() { runtime->declarations_end(); }

}  // namespace metal_sim

template <class T, uint32_t index>
METAL_SIM_INLINE bool is_function_constant_defined(metal_sim::FunctionConstant<T, index>) {
  return metal_sim::constant_defined(index);
}
