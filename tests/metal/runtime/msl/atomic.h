// Relaxed atomics on 32-bit integers: enough for status words and counters.
#pragma once

#include "matrix.h"

namespace metal_sim {
METAL_SIM_RUNTIME void atomic_access(const void* pointer, bool write) {
  runtime->access(pointer, 4, write, true, __builtin_return_address(0));
}
}  // namespace metal_sim

namespace metal {

enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  static_assert(sizeof(T) == 4, "only 32-bit atomics");
  T value;
};
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;

// All fibers of a threadgroup share one thread, and threadgroups run one after the other.
template <class T>
METAL_SIM_RUNTIME T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  metal_sim::atomic_access(const_cast<const atomic<T>*>(object), false);
  return object->value;
}
template <class T>
METAL_SIM_RUNTIME void atomic_store_explicit(volatile atomic<T>* object, T desired, memory_order) {
  metal_sim::atomic_access(const_cast<atomic<T>*>(object), true);
  object->value = desired;
}
#define METAL_SIM_ATOMIC(name, combine)                                           \
  template <class T>                                                              \
  METAL_SIM_RUNTIME T name(volatile atomic<T>* object, T operand, memory_order) { \
    metal_sim::atomic_access(const_cast<atomic<T>*>(object), true);               \
    const T old = object->value;                                                  \
    object->value = combine;                                                      \
    return old;                                                                   \
  }
METAL_SIM_ATOMIC(atomic_exchange_explicit, operand)
METAL_SIM_ATOMIC(atomic_fetch_add_explicit, T(old + operand))
METAL_SIM_ATOMIC(atomic_fetch_or_explicit, T(old | operand))
METAL_SIM_ATOMIC(atomic_fetch_max_explicit, max(old, operand))
METAL_SIM_ATOMIC(atomic_fetch_min_explicit, min(old, operand))
#undef METAL_SIM_ATOMIC

}  // namespace metal
