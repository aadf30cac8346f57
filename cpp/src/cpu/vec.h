// The vector type of the instruction set being compiled and every operation the kernels do with it.
//
// Built on the vector extensions of GCC and Clang: + - * / and comparisons are the operators
// themselves, and a * b + c becomes one fused multiply-add where there is one. The
// per-instruction-set headers add what the extensions cannot say. Vec holds kLanes float32; a
// comparison gives a VecI of 0 and -1 lanes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/isa.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef std::int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef std::uint32_t VecU __attribute__((vector_size(kLanes * 4)));
typedef std::uint64_t VecWide __attribute__((vector_size(kLanes * 4)));  // kLanes / 2 of them
typedef std::uint16_t VecHalf __attribute__((vector_size(kLanes * 2)));
// The same in memory of any alignment and any declared type.
typedef float VecInMemory __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
typedef std::uint16_t VecHalfInMemory
    __attribute__((vector_size(kLanes * 2), aligned(1), may_alias));
// kLanes / 2 float64, and as many float32.
typedef double VecDouble __attribute__((vector_size(kLanes * 4)));
typedef double VecDoubleInMemory __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
typedef float VecFew __attribute__((vector_size(kLanes * 2)));

FLASHATTN_INLINE Vec load(const void* from) { return *static_cast<const VecInMemory*>(from); }
FLASHATTN_INLINE void store(void* to, Vec x) { *static_cast<VecInMemory*>(to) = x; }

FLASHATTN_INLINE VecI load_int32(const std::int32_t* from) {
  return reinterpret_cast<VecI>(load(from));
}

// x - 0 rather than 0 + x: the latter must turn -0 into +0 and would change the bits of bf16 pairs.
FLASHATTN_INLINE Vec broadcast(float x) { return x - Vec{}; }
FLASHATTN_INLINE VecI broadcast(std::int32_t x) { return x - VecI{}; }

// 0, 1, 2, ... kLanes - 1.
FLASHATTN_INLINE VecI lane_numbers() {
  VecI lanes{};
  FLASHATTN_UNROLL for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

FLASHATTN_INLINE Vec select(VecI mask, Vec if_true, Vec if_false) {
  return mask ? if_true : if_false;
}

FLASHATTN_INLINE VecI bits_of(Vec x) { return reinterpret_cast<VecI>(x); }
FLASHATTN_INLINE Vec vec_of_bits(VecI x) { return reinterpret_cast<Vec>(x); }

// The numbers 0 ... count - 1 as template arguments.
template <int... lane>
struct LaneList {};
template <int count, int... lane>
struct MakeLaneList : MakeLaneList<count - 1, count - 1, lane...> {};
template <int... lane>
struct MakeLaneList<0, lane...> {
  using Type = LaneList<lane...>;
};
using AllLanes = MakeLaneList<kLanes>::Type;

// |x|, NaN included.
FLASHATTN_INLINE Vec magnitude(Vec x) {
  return vec_of_bits(bits_of(x) & broadcast(std::int32_t{0x7fffffff}));
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA

// Each header below defines, for its instruction set:
//   Vec max(Vec a, Vec b)             b where either is NaN: max(constant, x) keeps a NaN of x
//   Vec round_to_integer(Vec x)       nearest, ties to even
//   Vec times_power_of_two(p, n, x)   p * 2^n, and exactly 0 where x < -126 (NaN stays)
//   bool any(VecI mask)
//   VecWide multiply_low(a, b)        the 64-bit products of the low halves of each 64-bit lane
//   VecU widen_uint8(const void*)     kLanes 8-bit integers as 32-bit ones
//   VecU widen_uint16(const void*)    kLanes 16-bit integers as 32-bit ones
//   Vec widen_float16(const void*)    kLanes float16 values as float32
//   void narrow_float16(void*, Vec)   rounded to nearest even
//   void transpose(Vec (&r)[kLanes])  the kLanes x kLanes matrix of 32-bit units in registers
#if defined(__AVX512F__)
#include "cpu/vec_avx512.h"
#elif defined(__AVX2__)
#include "cpu/vec_avx2.h"
#elif defined(__SSE4_1__)
#include "cpu/vec_sse.h"
#elif defined(__aarch64__)
#include "cpu/vec_neon.h"
#else
#error "no vector operations for this instruction set"
#endif

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

FLASHATTN_INLINE Vec widen_bfloat16(const void* from) {
  return reinterpret_cast<Vec>(widen_uint16(from) << 16);
}

// Nearest even; a NaN keeps its sign and becomes quiet. In integers, because the bf16 conversion
// instructions flush denormals to zero.
FLASHATTN_INLINE void narrow_bfloat16(void* to, Vec x) {
  const VecU bits = reinterpret_cast<VecU>(x);
  const VecU rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const VecU quiet = (bits >> 16) | 0x40U;
  const VecU result = (x != x) ? quiet : rounded;
  *static_cast<VecHalfInMemory*>(to) = __builtin_convertvector(result, VecHalf);
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
