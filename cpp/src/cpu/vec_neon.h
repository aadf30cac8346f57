// Vector operations of NEON (every aarch64 processor). Included by vec.h only.
#pragma once

#include <arm_neon.h>

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

// vmaxq_f32 would return NaN for a NaN on either side; the compare keeps b, as on x86.
FLASHATTN_INLINE Vec max(Vec a, Vec b) { return select(a > b, a, b); }

FLASHATTN_INLINE Vec round_to_integer(Vec x) {
  return reinterpret_cast<Vec>(vrndnq_f32(reinterpret_cast<float32x4_t>(x)));
}

FLASHATTN_INLINE Vec times_power_of_two(Vec p, Vec n, Vec x) {
  const VecU exponent = reinterpret_cast<VecU>(vcvtq_s32_f32(reinterpret_cast<float32x4_t>(n)))
                        << 23;
  const VecU scaled = reinterpret_cast<VecU>(p) + exponent;
  return reinterpret_cast<Vec>(scaled & ~reinterpret_cast<VecU>(x < broadcast(-126.0F)));
}

FLASHATTN_INLINE bool any(VecI mask) { return vmaxvq_u32(reinterpret_cast<uint32x4_t>(mask)) != 0; }

FLASHATTN_INLINE VecWide multiply_low(VecWide a, VecWide b) {
  return reinterpret_cast<VecWide>(vmull_u32(vmovn_u64(reinterpret_cast<uint64x2_t>(a)),
                                             vmovn_u64(reinterpret_cast<uint64x2_t>(b))));
}

FLASHATTN_INLINE VecU widen_uint8(const void* from) {
  std::uint8_t bytes[8] = {};
  __builtin_memcpy(bytes, from, kLanes);
  return reinterpret_cast<VecU>(vmovl_u16(vget_low_u16(vmovl_u8(vld1_u8(bytes)))));
}

FLASHATTN_INLINE VecU widen_uint16(const void* from) {
  return __builtin_convertvector(*static_cast<const VecHalfInMemory*>(from), VecU);
}

FLASHATTN_INLINE Vec widen_float16(const void* from) {
  const VecHalf half = *static_cast<const VecHalfInMemory*>(from);
  return reinterpret_cast<Vec>(vcvt_f32_f16(reinterpret_cast<float16x4_t>(half)));
}

FLASHATTN_INLINE void narrow_float16(void* to, Vec x) {
  const float16x4_t half = vcvt_f16_f32(reinterpret_cast<float32x4_t>(x));
  *static_cast<VecHalfInMemory*>(to) = reinterpret_cast<VecHalf>(half);
}

FLASHATTN_INLINE void transpose(Vec (&r)[kLanes]) {
  const Vec t0 = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
  const Vec t1 = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
  const Vec t2 = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
  const Vec t3 = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  r[0] = __builtin_shufflevector(t0, t2, 0, 1, 4, 5);
  r[1] = __builtin_shufflevector(t0, t2, 2, 3, 6, 7);
  r[2] = __builtin_shufflevector(t1, t3, 0, 1, 4, 5);
  r[3] = __builtin_shufflevector(t1, t3, 2, 3, 6, 7);
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
