// Philox against Random123's published answers, and the dropout numbering against its formula.
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <vector>

#include "core/philox.h"

namespace {

using flashattn::DropoutNumbering;
using flashattn::philox4x32;
using flashattn::PhiloxBlock;

std::vector<std::uint32_t> words(const PhiloxBlock& block) {
  return {block.word[0], block.word[1], block.word[2], block.word[3]};
}

}  // namespace

BOOST_AUTO_TEST_SUITE(philox)

BOOST_AUTO_TEST_CASE(known_answers) {
  const std::vector<std::uint32_t> zeros = {0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U};
  const std::vector<std::uint32_t> ones = {0x408f276dU, 0x41c83b0eU, 0xa20bc7c6U, 0x6d5451fdU};
  const std::vector<std::uint32_t> pi = {0xd16cfe09U, 0x94fdccebU, 0x5001e420U, 0x24126ea1U};
  constexpr std::uint32_t kAll = 0xffffffffU;
  BOOST_TEST(words(philox4x32({{0, 0, 0, 0}}, 0, 0)) == zeros, boost::test_tools::per_element());
  BOOST_TEST(words(philox4x32({{kAll, kAll, kAll, kAll}}, kAll, kAll)) == ones,
             boost::test_tools::per_element());
  BOOST_TEST(words(philox4x32({{0x243f6a88U, 0x85a308d3U, 0x13198a2eU, 0x03707344U}}, 0xa4093822U,
                              0x299f31d0U)) == pi,
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_block_spans_four_elements_and_the_offset_shifts_by_blocks) {
  const std::uint64_t seed = 0x0123456789abcdefULL;
  for (std::uint64_t n = 0; n < 16; ++n) {
    const PhiloxBlock block =
        philox4x32({{static_cast<std::uint32_t>(7 + n / 4), 0, 0, 0}}, 0x89abcdefU, 0x01234567U);
    const float expected = static_cast<float>(block.word[n % 4] >> 8) / 16777216.0F;
    BOOST_TEST(flashattn::dropout_unit(seed, 7, n) == expected);
  }
}

BOOST_AUTO_TEST_CASE(counters_past_32_bits_use_the_second_word) {
  const std::uint64_t offset = 0xffffffffULL;
  const PhiloxBlock expected = philox4x32({{0, 1, 0, 0}}, 5, 0);
  BOOST_TEST(words(flashattn::dropout_block(5, offset, 1)) == words(expected),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(shards_number_their_scores_as_the_whole_call_does) {
  const DropoutNumbering whole{.global_heads = 4, .global_queries = 6, .global_keys = 10};
  const DropoutNumbering shard{.global_heads = 4,
                               .head_start = 2,
                               .global_queries = 6,
                               .query_start = 3,
                               .global_keys = 10,
                               .key_start = 5};
  BOOST_TEST(whole.index(1, 2, 3, 4) == ((1 * 4 + 2) * 6 + 3) * 10 + 4);
  for (std::uint64_t h = 0; h < 2; ++h) {
    for (std::uint64_t i = 0; i < 3; ++i) {
      for (std::uint64_t j = 0; j < 5; ++j) {
        BOOST_TEST(shard.index(1, h, i, j) == whole.index(1, h + 2, i + 3, j + 5));
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(an_element_stays_iff_its_unit_reaches_the_probability) {
  int kept = 0;
  for (std::uint64_t n = 0; n < 4000; ++n) {
    const auto unit = static_cast<double>(flashattn::dropout_unit(11, 0, n));
    BOOST_TEST(flashattn::dropout_keeps(11, 0, n, unit));
    BOOST_TEST(!flashattn::dropout_keeps(11, 0, n, unit + 0x1p-30));
    BOOST_TEST(!flashattn::dropout_keeps(11, 0, n, 1.0));
    kept += flashattn::dropout_keeps(11, 0, n, 0.25) ? 1 : 0;
  }
  BOOST_TEST(kept > 2850);  // 3000 +- 5.5 standard deviations
  BOOST_TEST(kept < 3150);
}

BOOST_AUTO_TEST_SUITE_END()
