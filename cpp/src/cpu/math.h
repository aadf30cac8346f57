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

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
