// float16 and bfloat16 as their bits, to and from float32, one element at a time: the exact
// definition that vector code and tests are held to. Widening is exact; narrowing rounds to
// nearest, ties to even, in every case, subnormals and overflow to infinity included; a NaN stays a
// NaN, quiet, with its sign.
#pragma once

#include <cstdint>

#include "core/inline.h"

namespace flashattn {

FLASHATTN_INLINE float float_from_bits(std::uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
FLASHATTN_INLINE std::uint32_t bits_of_float(float value) {
  return __builtin_bit_cast(std::uint32_t, value);
}

FLASHATTN_INLINE float bfloat16_to_float(std::uint16_t half) {
  return float_from_bits(static_cast<std::uint32_t>(half) << 16);
}

FLASHATTN_INLINE std::uint16_t float_to_bfloat16(float value) {
  const std::uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    return static_cast<std::uint16_t>((bits >> 16) |
                                      0x0040U);  // rounding could turn it into infinity
  }
  const std::uint32_t odd = (bits >> 16) & 1U;
  return static_cast<std::uint16_t>((bits + 0x7fffU + odd) >> 16);
}

FLASHATTN_INLINE float float16_to_float(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7fffU;
  if (magnitude >= 0x7c00U) {  // infinity, NaN
    const std::uint32_t quiet = magnitude > 0x7c00U ? 0x00400000U : 0U;
    return float_from_bits(sign | 0x7f800000U | ((magnitude & 0x3ffU) << 13) | quiet);
  }
  if (magnitude < 0x0400U) {  // zero and subnormals: a multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24F;
    return float_from_bits(bits_of_float(value) | sign);
  }
  return float_from_bits(sign | ((magnitude << 13) + (std::uint32_t{112} << 23)));
}

FLASHATTN_INLINE std::uint16_t float_to_float16(float value) {
  const std::uint32_t bits = bits_of_float(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {
    return static_cast<std::uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x3ffU));
  }
  if (magnitude >= 0x477ff000U) {  // 65520 and more round past the largest finite value, 65504
    return static_cast<std::uint16_t>(sign | 0x7c00U);
  }
  if (magnitude < 0x38800000U) {
    // Below 2^-14 the result counts steps of 2^-24; adding 0.5 puts that step at the last bit of a
    // float32, so the addition itself rounds to nearest even.
    const float shifted = float_from_bits(magnitude) + 0.5F;
    return static_cast<std::uint16_t>(sign | (bits_of_float(shifted) - 0x3f000000U));
  }
  const std::uint32_t odd = (magnitude >> 13) & 1U;
  const std::uint32_t rounded = magnitude + 0xfffU + odd - (std::uint32_t{112} << 23);
  return static_cast<std::uint16_t>(sign | (rounded >> 13));
}

}  // namespace flashattn
