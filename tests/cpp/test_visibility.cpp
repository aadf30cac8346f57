// Visibility against a brute force that asks the rule of each (row, key) pair, and the position
// rule against its table.
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/make_visibility.h"

namespace {

using flashattn::AttentionProblem;
using flashattn::Causal;
using flashattn::Interval;
using flashattn::kUnlimited;
using flashattn::make_visibility;
using flashattn::TileVisibility;
using flashattn::Visibility;

// The definition, one pair at a time.
bool sees(const Visibility& v, std::int64_t i, std::int64_t j) {
  const std::int64_t at = i + v.shift;
  return j >= 0 && j < v.key_limit && j >= at - v.left && j <= at + v.right;
}

std::vector<Visibility> small_rules() {
  std::vector<Visibility> rules;
  for (const std::int64_t rows : {1, 3, 4}) {
    for (const std::int64_t keys : {0, 1, 3, 5}) {
      for (std::int64_t shift = -6; shift <= 6; ++shift) {
        for (const std::int64_t left : {std::int64_t{0}, std::int64_t{2}, kUnlimited}) {
          for (const std::int64_t right : {std::int64_t{0}, std::int64_t{1}, kUnlimited}) {
            rules.push_back({rows, keys, shift, left, right});
          }
        }
      }
    }
  }
  return rules;
}

// Of the pairs in the tile: whether all, some or none see each other.
TileVisibility brute_tile(const Visibility& v, Interval rows, Interval keys) {
  bool any = false;
  bool all = true;
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      any = any || sees(v, i, j);
      all = all && sees(v, i, j);
    }
  }
  if (!any) return TileVisibility::kNone;
  return all ? TileVisibility::kAll : TileVisibility::kMixed;
}

// Calls body(begin, end) for every nonempty range within [0, count).
template <typename Body>
void for_each_range(std::int64_t count, Body&& body) {
  for (std::int64_t begin = 0; begin < count; ++begin) {
    for (std::int64_t end = begin + 1; end <= count; ++end) body(Interval{begin, end});
  }
}

}  // namespace

BOOST_AUTO_TEST_SUITE(visibility)

BOOST_AUTO_TEST_CASE(keys_of_row_are_exactly_the_visible_ones) {
  int wrong = 0;
  for (const Visibility& v : small_rules()) {
    for (std::int64_t i = 0; i < v.seqlen_q; ++i) {
      const Interval keys = v.keys_of_row(i);
      wrong += keys.begin > keys.end || keys.begin < 0;
      for (std::int64_t j = -2; j < v.key_limit + 2; ++j) {
        wrong += (keys.begin <= j && j < keys.end) != sees(v, i, j);
      }
    }
  }
  BOOST_TEST(wrong == 0);
}

BOOST_AUTO_TEST_CASE(a_tile_is_all_mixed_or_none_as_its_pairs_are) {
  int lost = 0;       // a visible pair in a tile called none: a wrong result
  int invented = 0;   // a hidden pair in a tile called all: a wrong result
  int imprecise = 0;  // called mixed though it is uniform: lost time only
  for (const Visibility& v : small_rules()) {
    for_each_range(v.seqlen_q, [&](Interval rows) {
      for_each_range(v.key_limit, [&](Interval keys) {
        const TileVisibility got = v.tile(rows.begin, rows.end, keys.begin, keys.end);
        const TileVisibility expected = brute_tile(v, rows, keys);
        lost += got == TileVisibility::kNone && expected != TileVisibility::kNone;
        invented += got == TileVisibility::kAll && expected != TileVisibility::kAll;
        imprecise += got == TileVisibility::kMixed && expected == TileVisibility::kAll;
      });
    });
  }
  BOOST_TEST(lost == 0);
  BOOST_TEST(invented == 0);
  BOOST_TEST(imprecise == 0);
}

BOOST_AUTO_TEST_CASE(ranges_to_visit_contain_every_visible_pair) {
  int wrong = 0;
  for (const Visibility& v : small_rules()) {
    for_each_range(v.seqlen_q, [&](Interval rows) {
      const Interval keys = v.keys_of_rows(rows.begin, rows.end);
      wrong += keys.begin < 0 || keys.end < keys.begin;
      for (std::int64_t i = rows.begin; i < rows.end; ++i) {
        for (std::int64_t j = 0; j < v.key_limit; ++j) {
          wrong += sees(v, i, j) && !(keys.begin <= j && j < keys.end);
        }
      }
    });
    for_each_range(v.key_limit, [&](Interval keys) {
      const Interval rows = v.rows_of_keys(keys.begin, keys.end);
      wrong += rows.begin < 0 || rows.end < rows.begin || rows.end > v.seqlen_q;
      for (std::int64_t i = 0; i < v.seqlen_q; ++i) {
        for (std::int64_t j = keys.begin; j < keys.end; ++j) {
          wrong += sees(v, i, j) && !(rows.begin <= i && i < rows.end);
        }
      }
    });
  }
  BOOST_TEST(wrong == 0);
}

BOOST_AUTO_TEST_CASE(positions_of_a_call_without_offsets) {
  AttentionProblem problem{.batch = 1, .seqlen_q = 2, .seqlen_k = 5};
  BOOST_TEST(make_visibility(problem, std::nullopt, std::nullopt).shift == 3);
  problem.causal = Causal::kBottomRight;
  const Visibility bottom = make_visibility(problem, std::nullopt, std::nullopt);
  BOOST_TEST(bottom.keys_of_row(0).end == 4);
  BOOST_TEST(bottom.keys_of_row(1).end == 5);
  // A key length moves the last row to the entry's last key.
  const Visibility shorter = make_visibility(problem, std::nullopt, 3);
  BOOST_TEST(shorter.keys_of_row(0).end == 2);
  BOOST_TEST(shorter.keys_of_row(1).end == 3);
  problem.causal = Causal::kTopLeft;
  const Visibility top = make_visibility(problem, std::nullopt, 3);
  BOOST_TEST(top.shift == 0);
  BOOST_TEST(top.keys_of_row(0).end == 1);
}

BOOST_AUTO_TEST_CASE(more_rows_than_keys_leave_the_first_rows_blind) {
  const AttentionProblem problem{
      .batch = 1, .seqlen_q = 5, .seqlen_k = 2, .causal = Causal::kBottomRight};
  const Visibility v = make_visibility(problem, std::nullopt, std::nullopt);
  for (std::int64_t i = 0; i < 3; ++i) BOOST_TEST(v.keys_of_row(i).end == v.keys_of_row(i).begin);
  BOOST_TEST(v.keys_of_row(3).end == 1);
  BOOST_TEST(v.keys_of_row(4).end == 2);
}

BOOST_AUTO_TEST_CASE(offsets_place_rows_and_keys_and_outrank_top_left) {
  const AttentionProblem problem{.batch = 1,
                                 .seqlen_q = 2,
                                 .seqlen_k = 5,
                                 .causal = Causal::kTopLeft,
                                 .window = {.left = 1, .right = -1},
                                 .has_q_offset = true,
                                 .q_offset = 12,
                                 .k_offset = 10};
  const Visibility v = make_visibility(problem, problem.q_offset, std::nullopt);
  BOOST_TEST(v.shift == 2);
  BOOST_TEST(v.keys_of_row(0).begin == 1);
  BOOST_TEST(v.keys_of_row(0).end == 3);
}

BOOST_AUTO_TEST_CASE(entries_read_their_own_offset_and_length) {
  std::int32_t offsets[] = {0, 4, 0};
  std::int64_t lengths[] = {5, 0, 2, 0, 3, 0};
  flashattn::AttentionInputs inputs;
  inputs.q_offsets = flashattn::contiguous_view(offsets, flashattn::DType::kInt32, 3);
  inputs.kv_lengths = flashattn::contiguous_view(lengths, flashattn::DType::kInt64, 3);
  inputs.kv_lengths.stride = {2};
  const AttentionProblem problem{.batch = 3,
                                 .seqlen_q = 1,
                                 .seqlen_k = 5,
                                 .causal = Causal::kBottomRight,
                                 .has_q_offset = true,
                                 .per_batch_q_offset = true,
                                 .kv_lengths = true};
  const std::vector<Visibility> all = flashattn::make_visibilities(problem, inputs);
  BOOST_TEST(all.size() == 3U);
  BOOST_TEST(all[0].shift == 0);
  BOOST_TEST(all[1].shift == 4);
  BOOST_TEST(all[1].key_limit == 2);
  BOOST_TEST(all[1].keys_of_row(0).end == 2);
  BOOST_TEST(all[2].keys_of_row(0).end == 1);
}

BOOST_AUTO_TEST_SUITE_END()
