// Vector operations of AVX2 with FMA and F16C (x86-64-v3). Included by vec.h only.
#pragma once

#include <immintrin.h>

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

FLASHATTN_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }

FLASHATTN_INLINE Vec round_to_integer(Vec x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

FLASHATTN_INLINE Vec times_power_of_two(Vec p, Vec n, Vec x) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  const __m256 scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
  return _mm256_and_ps(scaled, _mm256_cmp_ps(x, _mm256_set1_ps(-126.0F), _CMP_NLT_UQ));
}

FLASHATTN_INLINE bool any(VecI mask) {
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask)) != 0;
}

FLASHATTN_INLINE VecWide multiply_low(VecWide a, VecWide b) {
  return reinterpret_cast<VecWide>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}

FLASHATTN_INLINE VecU widen_uint8(const void* from) {
  return reinterpret_cast<VecU>(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
}

// The compiler's own conversion splits the vector in two and joins the halves.
FLASHATTN_INLINE VecU widen_uint16(const void* from) {
  return reinterpret_cast<VecU>(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
}

FLASHATTN_INLINE Vec widen_float16(const void* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}

FLASHATTN_INLINE void narrow_float16(void* to, Vec x) {
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

FLASHATTN_INLINE void transpose(Vec (&r)[kLanes]) {
  __m256 t[8];
  FLASHATTN_UNROLL for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  FLASHATTN_UNROLL for (int i = 0; i < 8; i += 4) {
    FLASHATTN_UNROLL for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
      r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
    }
  }
  FLASHATTN_UNROLL for (int j = 0; j < 4; ++j) {
    const __m256 low = r[j];
    r[j] = _mm256_permute2f128_ps(low, r[j + 4], 0x20);
    r[j + 4] = _mm256_permute2f128_ps(low, r[j + 4], 0x31);
  }
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
