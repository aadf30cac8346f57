// Storage types of tensors in device memory and their exact conversions to and from float.
// bfloat16 is read as its 16 bits: that needs no bfloat hardware or language version, and widening
// is a shift.
#pragma once

#include <metal_stdlib>

// One bfloat16 element: the upper half of a float.
struct Bfloat16 {
  ushort bits;
};

inline float to_float(float x) { return x; }
inline float to_float(half x) { return float(x); }
inline float to_float(Bfloat16 x) { return as_type<float>(uint(x.bits) << 16); }

inline bool is_finite_bits(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }

inline float finite_or_zero(float x) { return is_finite_bits(x) ? x : 0.0f; }

// Rounds to nearest even; a NaN stays a NaN.
inline ushort round_to_bfloat16(float x) {
  const uint bits = as_type<uint>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return ushort((bits >> 16) | 0x40u);
  return ushort((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline void store_float(device float* target, float x) { *target = x; }
inline void store_float(device half* target, float x) { *target = half(x); }
inline void store_float(device Bfloat16* target, float x) { target->bits = round_to_bfloat16(x); }
