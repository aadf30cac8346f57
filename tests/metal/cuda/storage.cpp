// The storage types; see storage.h.
#include "storage.h"

#include <cmath>
#include <cstring>

namespace {

std::uint16_t half_bits(float x) {
  const _Float16 h = static_cast<_Float16>(x);
  std::uint16_t bits;
  std::memcpy(&bits, &h, sizeof bits);
  return bits;
}
float from_half_bits(std::uint16_t bits) {
  _Float16 h;
  std::memcpy(&h, &bits, sizeof bits);
  return static_cast<float>(h);
}
std::uint16_t bfloat_bits(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
float from_bfloat_bits(std::uint16_t half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace

double rounding_unit(Storage storage) {
  switch (storage) {
    case Storage::kFloat16:
      return std::ldexp(1.0, -11);
    case Storage::kBFloat16:
      return std::ldexp(1.0, -8);
    default:
      return std::ldexp(1.0, -24);
  }
}

double storage_rounding(double x, Storage storage) {
  // Half the distance of two subnormal numbers: 2^-24 apart in float16, 2^-133 in bfloat16.
  const int exponent = storage == Storage::kFloat16    ? -25
                       : storage == Storage::kBFloat16 ? -134
                                                       : -150;
  return std::fmax(rounding_unit(storage) * std::fabs(x), std::ldexp(1.0, exponent));
}

float round_to(float x, Storage storage) {
  if (storage == Storage::kFloat16) return from_half_bits(half_bits(x));
  return storage == Storage::kBFloat16 ? from_bfloat_bits(bfloat_bits(x)) : x;
}

std::vector<std::uint8_t> to_storage(const std::vector<float>& values, Storage storage) {
  const std::size_t size = storage == Storage::kFloat32 ? 4 : 2;
  std::vector<std::uint8_t> bytes(values.size() * size);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (storage == Storage::kFloat32) {
      std::memcpy(&bytes[i * 4], &values[i], 4);
    } else {
      const std::uint16_t bits =
          storage == Storage::kFloat16 ? half_bits(values[i]) : bfloat_bits(values[i]);
      std::memcpy(&bytes[i * 2], &bits, 2);
    }
  }
  return bytes;
}

std::vector<float> from_storage(const std::vector<std::uint8_t>& bytes, Storage storage) {
  const std::size_t size = storage == Storage::kFloat32 ? 4 : 2;
  std::vector<float> values(bytes.size() / size);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (storage == Storage::kFloat32) {
      std::memcpy(&values[i], &bytes[i * 4], 4);
    } else {
      std::uint16_t bits;
      std::memcpy(&bits, &bytes[i * 2], 2);
      values[i] = storage == Storage::kFloat16 ? from_half_bits(bits) : from_bfloat_bits(bits);
    }
  }
  return values;
}
