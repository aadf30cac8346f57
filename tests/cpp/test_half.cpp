// Half conversions against an independent definition: the value of the bits by std::ldexp, and
// rounding by comparing distances in double.
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/half.h"

namespace {

using flashattn::bfloat16_to_float;
using flashattn::bits_of_float;
using flashattn::float16_to_float;
using flashattn::float_from_bits;
using flashattn::float_to_bfloat16;
using flashattn::float_to_float16;

struct Format {
  int exponent_bits;
  int fraction_bits;
};
constexpr Format kFloat16{5, 10};
constexpr Format kBFloat16{8, 7};

// The number that `bits` means, by the definition of the format.
double meaning(std::uint16_t bits, Format format) {
  const int exponent_mask = (1 << format.exponent_bits) - 1;
  const int bias = exponent_mask / 2;
  const int exponent = (bits >> format.fraction_bits) & exponent_mask;
  const int fraction = bits & ((1 << format.fraction_bits) - 1);
  const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
  if (exponent == exponent_mask) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  const double one = std::ldexp(1.0, format.fraction_bits);
  if (exponent == 0) return sign * std::ldexp(fraction / one, 1 - bias);
  return sign * std::ldexp(1.0 + fraction / one, exponent - bias);
}

// Whether `got` is a nearest value of the format to `value`, the even one in a tie. Only for values
// whose neighbours are finite.
bool rounds_to(double value, std::uint16_t got, Format format) {
  const double distance = std::fabs(meaning(got, format) - value);
  const auto magnitude = static_cast<std::uint16_t>(got & 0x7fffU);
  for (const int step : {-1, 1}) {
    if (magnitude == 0 && step < 0) continue;
    const auto neighbour = static_cast<std::uint16_t>(got + step);
    const double other = std::fabs(meaning(neighbour, format) - value);
    if (other < distance) return false;
    if (other == distance && (got & 1U) != 0) return false;
  }
  return true;
}

template <typename Widen, typename Narrow>
void check_every_value(Format format, Widen widen, Narrow narrow) {
  int wrong = 0;
  for (std::uint32_t i = 0; i < 0x10000U; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const double expected = meaning(bits, format);
    const float wide = widen(bits);
    if (std::isnan(expected)) {
      wrong += !std::isnan(wide) || !std::isnan(widen(narrow(wide))) ||
               std::signbit(wide) != ((bits & 0x8000U) != 0);
      continue;
    }
    wrong += static_cast<double>(wide) != expected || narrow(wide) != bits ||
             std::signbit(wide) != ((bits & 0x8000U) != 0);
  }
  BOOST_TEST(wrong == 0);
}

// Between every two neighbours: the tie and the float32 values around it.
template <typename Narrow>
void check_every_tie(Format format, std::uint16_t largest_finite, Narrow narrow) {
  int wrong = 0;
  for (std::uint16_t bits = 0; bits < largest_finite; ++bits) {
    const double low = meaning(bits, format);
    const double high = meaning(static_cast<std::uint16_t>(bits + 1), format);
    const auto tie = static_cast<float>((low + high) / 2);
    for (const float value : {std::nextafter(tie, 0.0F), tie, std::nextafter(tie, 1e38F)}) {
      wrong += !rounds_to(static_cast<double>(value), narrow(value), format);
      wrong += narrow(-value) != (narrow(value) | 0x8000U);
    }
  }
  BOOST_TEST(wrong == 0);
}

}  // namespace

BOOST_AUTO_TEST_SUITE(half)

BOOST_AUTO_TEST_CASE(float16_every_value_round_trips) {
  check_every_value(
      kFloat16, [](std::uint16_t b) { return float16_to_float(b); },
      [](float f) { return float_to_float16(f); });
}

BOOST_AUTO_TEST_CASE(bfloat16_every_value_round_trips) {
  check_every_value(
      kBFloat16, [](std::uint16_t b) { return bfloat16_to_float(b); },
      [](float f) { return float_to_bfloat16(f); });
}

BOOST_AUTO_TEST_CASE(float16_rounds_to_nearest_even) {
  check_every_tie(kFloat16, 0x7bffU, [](float f) { return float_to_float16(f); });
}

BOOST_AUTO_TEST_CASE(bfloat16_rounds_to_nearest_even) {
  check_every_tie(kBFloat16, 0x7f7fU, [](float f) { return float_to_bfloat16(f); });
}

BOOST_AUTO_TEST_CASE(overflow_goes_to_infinity_at_the_half_way_point) {
  BOOST_TEST(float_to_float16(65519.99F) == 0x7bffU);
  BOOST_TEST(float_to_float16(65520.0F) == 0x7c00U);
  BOOST_TEST(float_to_float16(-1e30F) == 0xfc00U);
  const float largest = std::numeric_limits<float>::max();
  BOOST_TEST(float_to_bfloat16(largest) == 0x7f80U);
  BOOST_TEST(float_to_bfloat16(float_from_bits(0x7f7f7fffU)) == 0x7f7fU);
}

BOOST_AUTO_TEST_CASE(a_nan_whose_payload_is_all_low_bits_stays_a_nan) {
  const float nan = float_from_bits(0x7f800001U);
  BOOST_TEST(std::isnan(float16_to_float(float_to_float16(nan))));
  BOOST_TEST(std::isnan(bfloat16_to_float(float_to_bfloat16(nan))));
}

BOOST_AUTO_TEST_CASE(float32_values_below_the_smallest_subnormal_round_to_zero) {
  BOOST_TEST(float_to_float16(0x1p-25F) == 0x0000U);  // the tie goes to even
  BOOST_TEST(float_to_float16(std::nextafter(0x1p-25F, 1.0F)) == 0x0001U);
  BOOST_TEST(float_to_float16(-0x1p-30F) == 0x8000U);
}

BOOST_AUTO_TEST_SUITE_END()
