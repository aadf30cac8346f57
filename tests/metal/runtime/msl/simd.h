// Barriers and the operations across the lanes of a simdgroup: shuffles, votes, reductions.
// Each is one exchange through the runtime, which checks that all lanes of the simdgroup execute
// the same operation on the same line. A shuffle orders no memory: only barriers do (the runtime's
// race checker holds kernels to that).
#pragma once

#include "math.h"

namespace metal_sim {

METAL_SIM_RUNTIME void barrier(abi::BarrierScope scope, int flags, abi::Source source) {
  runtime->barrier(scope, flags, source);
}

// The values of all 32 lanes, in a register-like local array.
template <class T>
struct Lanes {
  T value[32];
};
template <class T>
METAL_SIM_RUNTIME Lanes<T> exchange(T value, abi::ExchangeKind kind, const char* name,
                                    abi::Source source) {
  static_assert(sizeof(T) <= abi::kExchangeStride, "value too large for a simdgroup exchange");
  const char* slots =
      static_cast<const char*>(runtime->exchange(&value, sizeof(T), kind, name, source));
  Lanes<T> lanes;
  for (int i = 0; i < 32; ++i)
    __builtin_memcpy(&lanes.value[i], slots + size_t(i) * abi::kExchangeStride, sizeof(T));
  return lanes;
}
// One lane's value, or `fallback` when the lane does not exist.
template <class T>
METAL_SIM_RUNTIME T exchange_one(T value, int offset, bool relative, bool exclusive_or,
                                 const char* name, abi::Source source) {
  const char* slots = static_cast<const char*>(
      runtime->exchange(&value, sizeof(T), abi::ExchangeKind::kShuffle, name, source));
  const int lane = runtime->lane();
  const int from = exclusive_or ? (lane ^ offset) : relative ? lane + offset : offset;
  if (from < 0 || from >= 32) return value;
  T result;
  __builtin_memcpy(&result, slots + size_t(from) * abi::kExchangeStride, sizeof(T));
  return result;
}

}  // namespace metal_sim

namespace metal {

enum class mem_flags : int {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8
};
METAL_SIM_INLINE mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(int(a) | int(b));
}

METAL_SIM_INLINE void threadgroup_barrier(mem_flags flags, METAL_SIM_SOURCE) {
  metal_sim::barrier(metal_sim::abi::BarrierScope::kThreadgroup, int(flags), METAL_SIM_HERE);
}
METAL_SIM_INLINE void simdgroup_barrier(mem_flags flags, METAL_SIM_SOURCE) {
  metal_sim::barrier(metal_sim::abi::BarrierScope::kSimdgroup, int(flags), METAL_SIM_HERE);
}

#define METAL_SIM_SHUFFLE(name, offset, relative, exclusive_or)                                   \
  template <class T>                                                                              \
  METAL_SIM_COLLECTIVE T name(T value, ushort n, METAL_SIM_SOURCE) {                              \
    return metal_sim::exchange_one(value, offset, relative, exclusive_or, #name, METAL_SIM_HERE); \
  }
METAL_SIM_SHUFFLE(simd_shuffle, int(n), false, false)
METAL_SIM_SHUFFLE(simd_broadcast, int(n), false, false)
METAL_SIM_SHUFFLE(simd_shuffle_xor, int(n), false, true)
METAL_SIM_SHUFFLE(simd_shuffle_down, int(n), true, false)
METAL_SIM_SHUFFLE(simd_shuffle_up, -int(n), true, false)
#undef METAL_SIM_SHUFFLE
template <class T>
METAL_SIM_COLLECTIVE T simd_broadcast_first(T value, METAL_SIM_SOURCE) {
  return metal_sim::exchange_one(value, 0, false, false, "simd_broadcast_first", METAL_SIM_HERE);
}

// The order of a reduction is not specified by Metal; this one is a fixed tree over the lane
// numbers.
#define METAL_SIM_REDUCTION(name, combine)                                       \
  template <class T>                                                             \
  METAL_SIM_COLLECTIVE T name(T value, METAL_SIM_SOURCE) {                       \
    metal_sim::Lanes<T> lanes = metal_sim::exchange(                             \
        value, metal_sim::abi::ExchangeKind::kReduction, #name, METAL_SIM_HERE); \
    for (int width = 16; width > 0; width /= 2)                                  \
      for (int i = 0; i < width; ++i) {                                          \
        const T a = lanes.value[i], b = lanes.value[i + width];                  \
        lanes.value[i] = combine;                                                \
      }                                                                          \
    return lanes.value[0];                                                       \
  }
METAL_SIM_REDUCTION(simd_sum, T(a + b))
METAL_SIM_REDUCTION(simd_product, T(a* b))
METAL_SIM_REDUCTION(simd_max, max(a, b))
METAL_SIM_REDUCTION(simd_min, min(a, b))
METAL_SIM_REDUCTION(simd_or, T(a | b))
METAL_SIM_REDUCTION(simd_and, T(a& b))
#undef METAL_SIM_REDUCTION

METAL_SIM_COLLECTIVE bool simd_any(bool value, METAL_SIM_SOURCE) {
  const metal_sim::Lanes<bool> lanes =
      metal_sim::exchange(value, metal_sim::abi::ExchangeKind::kVote, "simd_any", METAL_SIM_HERE);
  bool result = false;
  for (int i = 0; i < 32; ++i) result = result || lanes.value[i];
  return result;
}
METAL_SIM_COLLECTIVE bool simd_all(bool value, METAL_SIM_SOURCE) {
  const metal_sim::Lanes<bool> lanes =
      metal_sim::exchange(value, metal_sim::abi::ExchangeKind::kVote, "simd_all", METAL_SIM_HERE);
  bool result = true;
  for (int i = 0; i < 32; ++i) result = result && lanes.value[i];
  return result;
}

}  // namespace metal
