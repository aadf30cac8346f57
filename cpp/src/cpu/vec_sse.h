// Vector operations of SSE4.2 (x86-64-v2): four lanes, no fused multiply-add, no float16
// instructions. Included by vec.h only.
#pragma once

#include <immintrin.h>

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

FLASHATTN_INLINE Vec max(Vec a, Vec b) { return _mm_max_ps(a, b); }

FLASHATTN_INLINE Vec round_to_integer(Vec x) {
  return _mm_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

FLASHATTN_INLINE Vec times_power_of_two(Vec p, Vec n, Vec x) {
  const __m128i exponent = _mm_slli_epi32(_mm_cvtps_epi32(n), 23);
  const __m128 scaled = _mm_castsi128_ps(_mm_add_epi32(_mm_castps_si128(p), exponent));
  return _mm_and_ps(scaled, _mm_cmpnlt_ps(x, _mm_set1_ps(-126.0F)));
}

FLASHATTN_INLINE bool any(VecI mask) {
  return _mm_movemask_ps(reinterpret_cast<__m128>(mask)) != 0;
}

FLASHATTN_INLINE VecWide multiply_low(VecWide a, VecWide b) {
  return reinterpret_cast<VecWide>(
      _mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
}

FLASHATTN_INLINE VecU widen_uint8(const void* from) {
  return reinterpret_cast<VecU>(_mm_cvtepu8_epi32(_mm_loadu_si32(from)));
}

FLASHATTN_INLINE VecU widen_uint16(const void* from) {
  return reinterpret_cast<VecU>(
      _mm_cvtepu16_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
}

// Exponent and mantissa shifted into place are 2^-112 of the value, denormals included; an all-ones
// exponent (infinity, NaN) is put back by hand.
FLASHATTN_INLINE Vec widen_float16(const void* from) {
  const VecU half = widen_uint16(from);
  const VecU magnitude =
      reinterpret_cast<VecU>(reinterpret_cast<Vec>((half & 0x7fffU) << 13) * 0x1p112F);
  const VecU special = (half & 0x7c00U) == 0x7c00U ? VecU{} + 0x7f800000U : VecU{};
  return reinterpret_cast<Vec>(magnitude | special | ((half & 0x8000U) << 16));
}

// Round to nearest even in integers; below the smallest normal float16 the addition of 0.5 rounds.
FLASHATTN_INLINE void narrow_float16(void* to, Vec x) {
  const VecU bits = reinterpret_cast<VecU>(x);
  const VecU magnitude = bits & 0x7fffffffU;
  const VecU normal = (magnitude - 0x37fff001U + ((magnitude >> 13) & 1U)) >> 13;
  const VecU denormal =
      reinterpret_cast<VecU>(reinterpret_cast<Vec>(magnitude) + 0.5F) - 0x3f000000U;
  const VecU special = magnitude > 0x7f800000U ? VecU{} + 0x7e00U : VecU{} + 0x7c00U;
  const VecU finite = magnitude < 0x38800000U ? denormal : normal;
  const VecU result = (magnitude >= 0x47800000U ? special : finite) | ((bits >> 16) & 0x8000U);
  *static_cast<VecHalfInMemory*>(to) = __builtin_convertvector(result, VecHalf);
}

FLASHATTN_INLINE void transpose(Vec (&r)[kLanes]) {
  const __m128 t0 = _mm_unpacklo_ps(r[0], r[1]);
  const __m128 t1 = _mm_unpackhi_ps(r[0], r[1]);
  const __m128 t2 = _mm_unpacklo_ps(r[2], r[3]);
  const __m128 t3 = _mm_unpackhi_ps(r[2], r[3]);
  r[0] = _mm_movelh_ps(t0, t2);
  r[1] = _mm_movehl_ps(t2, t0);
  r[2] = _mm_movelh_ps(t1, t3);
  r[3] = _mm_movehl_ps(t3, t1);
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
