// What clang calls but a freestanding kernel module does not have: memory functions and bfloat
// rounding.
#include <stddef.h>
#include <stdint.h>

extern "C" {

void* memset(void* destination, int value, size_t bytes) {
  volatile unsigned char* p = static_cast<unsigned char*>(destination);
  for (size_t i = 0; i < bytes; ++i) p[i] = static_cast<unsigned char>(value);
  return destination;
}

void* memcpy(void* destination, const void* source, size_t bytes) {
  volatile unsigned char* d = static_cast<unsigned char*>(destination);
  const unsigned char* s = static_cast<const unsigned char*>(source);
  for (size_t i = 0; i < bytes; ++i) d[i] = s[i];
  return destination;
}

// Round to nearest, ties to even; NaN stays NaN.
__bf16 __truncsfbf2(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = is_nan ? bits | 0x00400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
  const uint16_t half_bits = static_cast<uint16_t>(rounded >> 16);
  __bf16 result;
  __builtin_memcpy(&result, &half_bits, sizeof result);
  return result;
}

}  // extern "C"
