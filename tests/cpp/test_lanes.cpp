// Score modifiers over vectors, for every instruction set of this machine, against one element at a
// time: tanh, dropout's words, the bias of a mask, and their order.
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/half.h"
#include "cpu/dispatch.h"
#include "lanes/lane_functions.h"

namespace flashattn::cpu {

#if defined(FLASHATTN_HAVE_CPU_ISA_v4_bf16)
namespace isa_v4_bf16 {
extern const LaneFunctions kLaneFunctions;
}
#endif
#if defined(FLASHATTN_HAVE_CPU_ISA_v4)
namespace isa_v4 {
extern const LaneFunctions kLaneFunctions;
}
#endif
#if defined(FLASHATTN_HAVE_CPU_ISA_v3)
namespace isa_v3 {
extern const LaneFunctions kLaneFunctions;
}
#endif
#if defined(FLASHATTN_HAVE_CPU_ISA_v2)
namespace isa_v2 {
extern const LaneFunctions kLaneFunctions;
}
#endif
#if defined(FLASHATTN_HAVE_CPU_ISA_neon)
namespace isa_neon {
extern const LaneFunctions kLaneFunctions;
}
#endif

}  // namespace flashattn::cpu

namespace {

using namespace flashattn;
using namespace flashattn::cpu;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

const std::vector<const LaneFunctions*> kBuilt = {
#if defined(FLASHATTN_HAVE_CPU_ISA_v4_bf16)
    &isa_v4_bf16::kLaneFunctions,
#endif
#if defined(FLASHATTN_HAVE_CPU_ISA_v4)
    &isa_v4::kLaneFunctions,
#endif
#if defined(FLASHATTN_HAVE_CPU_ISA_v3)
    &isa_v3::kLaneFunctions,
#endif
#if defined(FLASHATTN_HAVE_CPU_ISA_v2)
    &isa_v2::kLaneFunctions,
#endif
#if defined(FLASHATTN_HAVE_CPU_ISA_neon)
    &isa_neon::kLaneFunctions,
#endif
};

// FLASHATTN_CPU_ISA_NAME of an instruction set: "x86-64-v4-bf16" is built as v4_bf16.
std::string build_name(std::string name) {
  const std::string prefix = "x86-64-";
  if (name.starts_with(prefix)) name.erase(0, prefix.size());
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// Calls body(functions) for every instruction set that runs here.
template <class Body>
void for_each_isa(const Body& body) {
  int ran = 0;
  for (const std::string& name : supported_isas()) {
    set_isa(name);
    for (const LaneFunctions* functions : kBuilt) {
      if (functions->isa != build_name(name)) continue;
      BOOST_TEST_CONTEXT(name) body(*functions);
      ++ran;
    }
  }
  set_isa("");
  BOOST_TEST(ran == static_cast<int>(supported_isas().size()));
}

// How far off, in units of the last place of the expected value.
double ulps(float got, double expected) {
  const auto rounded = static_cast<float>(std::abs(expected));
  const float ulp = std::nextafter(rounded, kInfinity) - rounded;
  return std::abs(static_cast<double>(got) - expected) / static_cast<double>(ulp);
}

// Which of some tiles' weights stay, by core/philox.h alone.
std::vector<std::uint8_t> scalar_keep(const DropoutRule& rule, int lanes, std::uint64_t head,
                                      std::uint64_t first_key, int keys) {
  std::vector<std::uint8_t> keep;
  for (int k = 0; k < keys; ++k) {
    for (int lane = 0; lane < lanes; ++lane) {
      const std::uint64_t n = rule.numbering.index(0, head, static_cast<std::uint64_t>(lane),
                                                   first_key + static_cast<std::uint64_t>(k));
      const std::uint32_t word = dropout_block(rule.seed, rule.offset, n / 4).word[n % 4];
      keep.push_back((word >> 8) >= rule.threshold ? 1 : 0);
    }
  }
  return keep;
}

// Masks as the tests make them: `rows` x `keys` elements of a dtype.
struct TestMask {
  std::vector<std::uint8_t> memory;
  std::vector<float> values;  // what they stand for
  ScoreMask mask;
};

void put(DType dtype, float value, std::uint8_t* to) {
  const std::uint16_t half =
      dtype == DType::kFloat16 ? float_to_float16(value) : float_to_bfloat16(value);
  const auto wide = static_cast<double>(value);
  const bool open = value == 0.0F;
  switch (dtype) {
    case DType::kBool:
      std::memcpy(to, &open, 1);
      return;
    case DType::kFloat32:
      std::memcpy(to, &value, 4);
      return;
    case DType::kFloat64:
      std::memcpy(to, &wide, 8);
      return;
    default:
      std::memcpy(to, &half, 2);
  }
}

// Small multiples of 1/8, which every dtype holds, and -inf; for bool 0 and -inf.
TestMask random_mask(DType dtype, std::int64_t rows, std::int64_t keys) {
  std::mt19937 random(7);
  const std::size_t item = item_size(dtype);
  TestMask made;
  made.memory.resize(static_cast<std::size_t>(rows * keys) * item);
  for (std::int64_t i = 0; i < rows * keys; ++i) {
    float value = static_cast<float>(random() % 64) / 8.0F - 4.0F;
    if (dtype == DType::kBool) value = 0.0F;
    if (random() % 3 == 0) value = -kInfinity;
    made.values.push_back(value);
    put(dtype, value, made.memory.data() + static_cast<std::size_t>(i) * item);
  }
  made.mask = {.data = made.memory.data(), .dtype = dtype, .row_stride = keys, .key_stride = 1};
  return made;
}

constexpr DType kMaskDTypes[] = {DType::kBool, DType::kFloat16, DType::kBFloat16, DType::kFloat32,
                                 DType::kFloat64};

}  // namespace

BOOST_AUTO_TEST_SUITE(lanes)

BOOST_AUTO_TEST_CASE(tanh_is_within_four_units_in_the_last_place_at_any_size) {
  std::vector<float> x;
  for (int i = 0; i < 160000; ++i) {
    const double size = std::exp2(-60.0 + 64.0 * i / 160000.0);
    x.push_back(static_cast<float>(i % 2 == 0 ? size : -size));
  }
  std::vector<float> value(x.size());
  std::vector<float> slope(x.size());
  for_each_isa([&](const LaneFunctions& lanes) {
    lanes.tanh(x.data(), static_cast<std::int64_t>(x.size()), value.data(), slope.data());
    double worst = 0.0;
    double worst_slope = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double wide = static_cast<double>(x[i]);
      worst = std::max(worst, ulps(value[i], std::tanh(wide)));
      const double cosh = std::cosh(wide);
      worst_slope =
          std::max(worst_slope, std::abs(static_cast<double>(slope[i]) - 1.0 / (cosh * cosh)));
    }
    BOOST_TEST(worst < 4.0);
    BOOST_TEST(worst_slope < 4e-7);
  });
}

BOOST_AUTO_TEST_CASE(tanh_of_zero_infinity_and_nan) {
  std::vector<float> x(16, 0.0F);
  x[1] = kInfinity;
  x[2] = -kInfinity;
  x[3] = std::numeric_limits<float>::quiet_NaN();
  x[4] = -0.0F;
  std::vector<float> value(16);
  std::vector<float> slope(16);
  for_each_isa([&](const LaneFunctions& lanes) {
    lanes.tanh(x.data(), 16, value.data(), slope.data());
    BOOST_TEST(value[0] == 0.0F);
    BOOST_TEST(slope[0] == 1.0F);
    BOOST_TEST(ulps(value[1], 1.0) < 4.0);
    BOOST_TEST(value[2] == -value[1]);
    BOOST_TEST(std::isnan(value[3]));
    BOOST_TEST(std::isnan(slope[3]));
    BOOST_TEST(std::signbit(value[4]));
  });
}

BOOST_AUTO_TEST_CASE(dropout_has_the_bits_of_the_scalar_generator_at_every_alignment) {
  for_each_isa([&](const LaneFunctions& lanes) {
    for (const std::uint64_t keys : {64U, 65U, 66U, 67U}) {
      for (const std::uint64_t start : {0U, 1U, 2U, 3U, 8U}) {
        AttentionJob job;
        job.dropout = {.threshold = 5000000,
                       .seed = 0x0123'4567'89ab'cdefU,
                       .offset = 0xffff'fffeU,
                       .numbering = {.global_heads = 3,
                                     .head_start = 1,
                                     .global_queries = 100,
                                     .query_start = 40,
                                     .global_keys = keys,
                                     .key_start = start}};
        constexpr int kTiles = 5;
        std::vector<std::uint8_t> keep(
            static_cast<std::size_t>(kTiles * lanes.tile_keys * lanes.lanes));
        lanes.dropout(job, 1, 12, kTiles, keep.data());
        BOOST_TEST_CONTEXT(keys << " keys from " << start)
        BOOST_TEST(keep == scalar_keep(job.dropout, lanes.lanes, 1, 12, kTiles * lanes.tile_keys),
                   boost::test_tools::per_element());
      }
    }
  });
}

BOOST_AUTO_TEST_CASE(dropout_numbers_past_2_to_the_32_and_2_to_the_64) {
  for_each_isa([&](const LaneFunctions& lanes) {
    AttentionJob job;
    job.dropout = {.threshold = 1U << 23,
                   .seed = 9,
                   .offset = 0xffff'ffff'ffff'fff0U,
                   .numbering = {.global_heads = 1U << 20,
                                 .head_start = (1U << 20) - 8,
                                 .global_queries = 1U << 21,
                                 .query_start = (1U << 21) - 32,
                                 .global_keys = (1U << 23) + 1,
                                 .key_start = 1U << 22}};
    std::vector<std::uint8_t> keep(static_cast<std::size_t>(4 * lanes.tile_keys * lanes.lanes));
    lanes.dropout(job, 7, 0, 4, keep.data());
    BOOST_TEST(keep == scalar_keep(job.dropout, lanes.lanes, 7, 0, 4 * lanes.tile_keys),
               boost::test_tools::per_element());
  });
}

BOOST_AUTO_TEST_CASE(dropout_of_probability_one_keeps_nothing_and_of_almost_none_keeps_nearly_all) {
  for_each_isa([&](const LaneFunctions& lanes) {
    AttentionJob job;
    job.dropout = {.threshold = 1U << 24,
                   .numbering = {.global_heads = 1, .global_queries = 64, .global_keys = 64}};
    std::vector<std::uint8_t> keep(static_cast<std::size_t>(lanes.tile_keys * lanes.lanes));
    lanes.dropout(job, 0, 0, 1, keep.data());
    BOOST_TEST(std::count(keep.begin(), keep.end(), 0) == static_cast<std::ptrdiff_t>(keep.size()));
    job.dropout.threshold = 1;
    lanes.dropout(job, 0, 0, 1, keep.data());
    BOOST_TEST(std::count(keep.begin(), keep.end(), 1) == static_cast<std::ptrdiff_t>(keep.size()));
  });
}

BOOST_AUTO_TEST_CASE(bias_of_every_dtype_and_stride) {
  constexpr std::int64_t kRows = 40;
  constexpr std::int64_t kKeys = 44;  // ends within the bias of the last keys
  for (const DType dtype : kMaskDTypes) {
    const TestMask made = random_mask(dtype, kRows, kKeys);
    struct Strides {
      std::int64_t row;
      std::int64_t key;
      std::int64_t first;
    };
    // As it is, without rows, without keys, backwards, every second key.
    const Strides all[] = {{kKeys, 1, 0},
                           {0, 1, 3 * kKeys},
                           {kKeys, 0, 5},
                           {-kKeys, -1, kRows * kKeys - 1},
                           {kKeys, 2, 0}};
    for (const Strides& strides : all) {
      AttentionJob job;
      job.seqlen_k = strides.key == 2 ? kKeys / 2 : kKeys;
      job.mask = made.mask;
      job.mask.data =
          made.memory.data() + static_cast<std::size_t>(strides.first) * item_size(dtype);
      job.mask.row_stride = strides.row;
      job.mask.key_stride = strides.key;
      for_each_isa([&](const LaneFunctions& lanes) {
        std::vector<float> bias(static_cast<std::size_t>(lanes.bias_keys * lanes.lanes));
        for (std::int64_t key = 0; key < job.seqlen_k; key += lanes.bias_keys) {
          lanes.bias(job, 0, key, bias.data());
          for (std::int64_t k = key; k < std::min(key + lanes.bias_keys, job.seqlen_k); ++k) {
            for (std::int64_t lane = 0; lane < lanes.lanes; ++lane) {
              const float expected = made.values[static_cast<std::size_t>(
                  strides.first + lane * strides.row + k * strides.key)];
              const float got = bias[static_cast<std::size_t>((k - key) * lanes.lanes + lane)];
              if (got != expected) BOOST_ERROR("bias " << got << " must be " << expected);
            }
          }
        }
      });
    }
  }
}

BOOST_AUTO_TEST_CASE(finite_float64_beyond_float32_stays_finite_and_nan_stays) {
  std::vector<double> values(64, 0.0);
  values[0] = -1e300;
  values[1] = 1e300;
  values[2] = std::numeric_limits<double>::quiet_NaN();
  values[3] = -std::numeric_limits<double>::infinity();
  AttentionJob job;
  job.seqlen_k = 64;
  job.mask = {.data = values.data(), .dtype = DType::kFloat64, .key_stride = 1};
  for_each_isa([&](const LaneFunctions& lanes) {
    std::vector<float> bias(static_cast<std::size_t>(lanes.bias_keys * lanes.lanes));
    BOOST_TEST((lanes.bias(job, 0, 0, bias.data()) == TileVisibility::kMixed));
    const auto at = [&](int key) { return bias[static_cast<std::size_t>(key * lanes.lanes)]; };
    BOOST_TEST(at(0) == -std::numeric_limits<float>::max());
    BOOST_TEST(at(1) == std::numeric_limits<float>::max());
    BOOST_TEST(std::isnan(at(2)));
    BOOST_TEST(at(3) == -kInfinity);
    BOOST_TEST((lanes.bias(job, 0, 16, bias.data()) == TileVisibility::kAll));
  });
}

BOOST_AUTO_TEST_CASE(modifiers_in_their_order_and_an_excluded_nan_is_excluded) {
  const TestMask made = random_mask(DType::kFloat32, 32, 64);
  const float slope = 0.25F;
  Visibility visibility{.seqlen_q = 32, .key_limit = 64, .shift = std::int64_t{1} << 55};
  for_each_isa([&](const LaneFunctions& lanes) {
    AttentionJob job;
    job.scale = 0.5F;
    job.softcap = 3.0F;
    job.seqlen_k = 64;
    job.slopes = {.data = &slope};
    job.mask = made.mask;
    job.visibility = &visibility;
    const auto width = static_cast<std::size_t>(lanes.lanes);
    for (const std::int64_t shift : {std::int64_t{20}, std::int64_t{-9}}) {
      visibility.shift = shift;
      std::vector<float> s(static_cast<std::size_t>(lanes.tile_keys) * width, 2.5F);
      s[1] = std::numeric_limits<float>::quiet_NaN();
      lanes.modify(job, 0, 16, 8, s.data());
      for (int i = 0; i < lanes.tile_keys; ++i) {
        for (int lane = 0; lane < lanes.lanes; ++lane) {
          const int key = 16 + 8 + i;
          const float bias = made.values[static_cast<std::size_t>(lane * 64 + key)];
          const auto distance = static_cast<double>(std::abs(lane + shift - key));
          const double expected =
              3.0 * std::tanh(0.5 * 2.5 / 3.0) - 0.25 * distance + static_cast<double>(bias);
          const float got = s[static_cast<std::size_t>(i) * width + static_cast<std::size_t>(lane)];
          if (bias == -kInfinity) {
            BOOST_TEST(got == -kInfinity);
          } else if (i == 0 && lane == 1) {
            BOOST_TEST(std::isnan(got));
          } else {
            BOOST_TEST(std::abs(static_cast<double>(got) - expected) <= 2e-6);
          }
        }
      }
    }
  });
}

BOOST_AUTO_TEST_SUITE_END()
