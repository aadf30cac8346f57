// Elementary functions over a Vec. exp2 is all that the kernels need: scale * log2(e) is folded
// into its argument by the caller.
#pragma once

#include "cpu/vec.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

constexpr float kLog2E = 1.4426950408889634F;
constexpr float kLn2 = 0.6931471805599453F;
constexpr float kInfinity = __builtin_inff();

// 2^x for x <= 127: relative error 7.5e-8 at degree 5 and 7.5e-5 at degree 3 (a tenth of a bf16
// rounding). Exactly 0 below 2^-126, -inf included, so that no product ever meets a denormal
// weight; NaN gives NaN.
template <int degree>
FLASHATTN_INLINE Vec exp2(Vec x) {
  static_assert(degree == 3 || degree == 5);
  const Vec n = round_to_integer(x);
  const Vec f = x - n;  // in [-1/2, 1/2]; the polynomials are minimax in relative error there
  Vec p;
  if constexpr (degree == 5) {
    p = broadcast(0.001327647129073739F);
    p = p * f + broadcast(0.009675540961325169F);
    p = p * f + broadcast(0.05550713092088699F);
    p = p * f + broadcast(0.24022120237350464F);
    p = p * f + broadcast(0.6931469440460205F);
    p = p * f + broadcast(1.0F);
  } else {
    p = broadcast(0.055171669F);
    p = p * f + broadcast(0.24261113F);
    p = p * f + broadcast(0.69326098F);
    p = p * f + broadcast(0.99992807F);
  }
  return times_power_of_two(p, n, x);
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
