// Vector operations of AVX-512 (x86-64-v4), and of its bf16 extension where the build has it.
// Included by vec.h only.
#pragma once

#include <immintrin.h>

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

FLASHATTN_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }

FLASHATTN_INLINE Vec round_to_integer(Vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

FLASHATTN_INLINE Vec times_power_of_two(Vec p, Vec n, Vec x) {
  const __mmask16 keep = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0F), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(keep, p, n);
}

FLASHATTN_INLINE bool any(VecI mask) {
  const __m512i m = reinterpret_cast<__m512i>(mask);
  return _mm512_test_epi32_mask(m, m) != 0;
}

FLASHATTN_INLINE VecWide multiply_low(VecWide a, VecWide b) {
  return reinterpret_cast<VecWide>(
      _mm512_mul_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}

FLASHATTN_INLINE VecU widen_uint8(const void* from) {
  return reinterpret_cast<VecU>(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
}

// The compiler's own conversion splits the vector in two and joins the halves.
FLASHATTN_INLINE VecU widen_uint16(const void* from) {
  return reinterpret_cast<VecU>(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from))));
}

FLASHATTN_INLINE Vec widen_float16(const void* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}

FLASHATTN_INLINE void narrow_float16(void* to, Vec x) {
  _mm256_storeu_si256(static_cast<__m256i*>(to),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// 32-bit, 64-bit, then 128-bit interleaves: log2(16) rounds.
FLASHATTN_INLINE void transpose(Vec (&r)[kLanes]) {
  __m512 t[16];
  FLASHATTN_UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  FLASHATTN_UNROLL for (int i = 0; i < 16; i += 4) {
    FLASHATTN_UNROLL for (int j = 0; j < 2; ++j) {
      const __m512d a = _mm512_castps_pd(t[i + j]);
      const __m512d b = _mm512_castps_pd(t[i + j + 2]);
      r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
  FLASHATTN_UNROLL for (int i = 0; i < 16; i += 8) {
    FLASHATTN_UNROLL for (int j = 0; j < 4; ++j) {
      t[i + j] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0xdd);
    }
  }
  FLASHATTN_UNROLL for (int j = 0; j < 8; ++j) {
    r[j] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0x88);
    r[j + 8] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0xdd);
  }
}

#if defined(__AVX512BF16__)
#define FLASHATTN_HAS_BF16_DOT 1

// acc + a.low * b.low + a.high * b.high per lane, a and b holding a pair of bf16 in each lane.
FLASHATTN_INLINE Vec dot_bf16_pairs(Vec acc, Vec a, Vec b) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// 32 bf16 in order: those of `low`, then those of `high`.
FLASHATTN_INLINE Vec concat_bf16(Vec low, Vec high) {
  return reinterpret_cast<Vec>(_mm512_cvtne2ps_pbh(high, low));
}

// Not local to the function below: clang would give it a weak symbol there.
constexpr std::uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// Lane i holds the pair (low[i], high[i]) as bf16.
FLASHATTN_INLINE Vec interleave_bf16(Vec low, Vec high) {
  const __m512i order = _mm512_loadu_si512(kInterleave);
  const __m512i both = reinterpret_cast<__m512i>(concat_bf16(low, high));
  return reinterpret_cast<Vec>(_mm512_permutexvar_epi16(order, both));
}
#endif

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
