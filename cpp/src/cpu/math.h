// Elementary functions over a Vec. exp2 is all that the plain kernels need: scale * log2(e) is
// folded into its argument by the caller; tanh is the softcap's.
#pragma once

#include "cpu/vec.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

constexpr float kLog2E = 1.4426950408889634F;
constexpr float kLn2 = 0.6931471805599453F;
constexpr float kInfinity = __builtin_inff();

// (2^f - 1) / f for f in [-1/2, 1/2]: minimax in the relative error of 2^f, 1.6e-8 before rounding
// at degree 6 and 1.0e-4 at degree 3 (a twentieth of the bf16 rounding of the weight that it
// computes).
template <int degree>
FLASHATTN_INLINE Vec exp2_slope(Vec f) {
  static_assert(degree == 3 || degree == 6);
  Vec p;
  if constexpr (degree == 6) {
    p = broadcast(0.00015353361959569156F);
    p = p * f + broadcast(0.0013398875016719103F);
    p = p * f + broadcast(0.00961843691766262F);
    p = p * f + broadcast(0.055503323674201965F);
    p = p * f + broadcast(0.24022647738456726F);
    p = p * f + broadcast(0.6931471824645996F);
  } else {
    p = broadcast(0.05500892549753189F);
    p = p * f + broadcast(0.24221095442771912F);
    p = p * f + broadcast(0.6932829022407532F);
  }
  return p;
}

// 2^x for x <= 127. 2^0 is exactly 1, so equal scores give an exact LSE. Exactly 0 below 2^-126,
// -inf included, so that no product ever meets a denormal weight; NaN gives NaN.
template <int degree>
FLASHATTN_INLINE Vec exp2(Vec x) {
  const Vec n = round_to_integer(x);
  const Vec f = x - n;
  const Vec p = exp2_slope<degree>(f) * f + broadcast(1.0F);
  return times_power_of_two(p, n, x);
}

struct Tanh {
  Vec value;  // below 4 ulp off, however small x is; constant from |x| = 10 on
  Vec slope;  // 1 - value^2, absolute error below 4e-7
};

// With e = exp(2|x|) - 1, which is small where x is: tanh|x| = e / (e + 2) and 1 - tanh^2 =
// 4 (e + 1) / (e + 2)^2. NaN stays.
FLASHATTN_INLINE Tanh tanh(Vec x) {
  const Vec size = magnitude(x);
  const VecI sign = bits_of(x) ^ bits_of(size);
  const Vec limited = select(size > broadcast(10.0F), broadcast(10.0F), size);
  const Vec y = limited * broadcast(2.0F * kLog2E);
  const Vec n = round_to_integer(y);
  const Vec f = y - n;
  const Vec power = times_power_of_two(broadcast(1.0F), n, n);
  const Vec e = exp2_slope<6>(f) * f * power + (power - broadcast(1.0F));
  const Vec r = broadcast(1.0F) / (e + broadcast(2.0F));
  return {.value = vec_of_bits(bits_of(e * r) | sign),
          .slope = broadcast(4.0F) * (e + broadcast(1.0F)) * (r * r)};
}

// Natural logarithm of x in [1, 2^31], relative error 1e-7; NaN and +inf stay, 0 gives -inf. x =
// 2^e * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)], and log(1 + f) = f - f^2 / 2 + f^3 *
// polynomial(f).
FLASHATTN_INLINE Vec log(Vec x) {
  constexpr std::int32_t kSqrtHalfBits = 0x3f3504f3;
  const VecI offset = bits_of(x) - kSqrtHalfBits;
  const Vec e = __builtin_convertvector(offset >> 23, Vec);
  const Vec f = vec_of_bits((offset & 0x007fffff) + kSqrtHalfBits) - 1.0F;
  Vec p = broadcast(0.06746454536914825F);
  p = p * f + broadcast(-0.11675630509853363F);
  p = p * f + broadcast(0.11888235807418823F);
  p = p * f + broadcast(-0.12405595928430557F);
  p = p * f + broadcast(0.1421954184770584F);
  p = p * f + broadcast(-0.16667994856834412F);
  p = p * f + broadcast(0.2000211924314499F);
  p = p * f + broadcast(-0.25000008940696716F);
  p = p * f + broadcast(0.3333331346511841F);
  const Vec f2 = f * f;
  const Vec result = e * broadcast(kLn2) + (f - f2 * broadcast(0.5F) + f2 * f * p);
  const Vec or_special = select((x > 0.0F) & (x < kInfinity), result, x + x);
  return select(x == Vec{}, broadcast(-kInfinity), or_special);
}

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
