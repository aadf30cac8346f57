// The tuning table: candidates, the text form and what it refuses.
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <string>

#include "metal/tuning.h"
#include "metal/tuning_table.h"

using namespace flashattn;
using namespace flashattn::metal;

BOOST_AUTO_TEST_SUITE(tuning_table)

namespace {

DeviceFacts facts_with(LaneMap map) {
  DeviceFacts facts;
  facts.float_map = facts.half_map = map;
  return facts;
}

}  // namespace

BOOST_AUTO_TEST_CASE(slots_follow_the_lane_map) {
  BOOST_TEST(tuning_slots(facts_with(LaneMap::kUnknown)).empty());
  // forward, dq, dv, dk for three widths and three types, and the fused kernel for narrow tiles.
  BOOST_TEST(tuning_slots(facts_with(LaneMap::kAny)).size() == 39U);
  for (const TuningSlot& slot : tuning_slots(facts_with(LaneMap::kApple))) {
    BOOST_TEST(slot.apple == (slot.kind != KernelKind::kBackwardDkv));
  }
}

BOOST_AUTO_TEST_CASE(the_shipped_choice_comes_first_and_none_comes_twice) {
  for (const LaneMap map : {LaneMap::kAny, LaneMap::kApple}) {
    for (const TuningSlot& slot : tuning_slots(facts_with(map))) {
      const auto found = candidates(slot);
      BOOST_TEST((found.front() == shipped_choice(slot)));
      BOOST_TEST((std::count(found.begin(), found.end(), TuningChoice()) == 1));
      for (std::size_t i = 0; i < found.size(); ++i)
        for (std::size_t j = 0; j < i; ++j) BOOST_TEST((found[i] != found[j]));
    }
  }
}

BOOST_AUTO_TEST_CASE(text_comes_back) {
  TuningTable table;
  for (const TuningSlot& slot : tuning_slots(facts_with(LaneMap::kApple)))
    table.set(slot, candidates(slot)[1]);
  const auto read = TuningTable::parse(table.to_text());
  BOOST_REQUIRE(read);
  BOOST_TEST(read->to_text() == table.to_text());
  for (const TuningSlot& slot : tuning_slots(facts_with(LaneMap::kApple)))
    BOOST_TEST((read->choice(slot) == candidates(slot)[1]));
}

BOOST_AUTO_TEST_CASE(damaged_text_is_no_table) {
  const std::string whole = "flashattn tuning 1\nforward float32 64 apple staged\nend\n";
  BOOST_REQUIRE(TuningTable::parse(whole));
  for (std::size_t length = 0; length + 2 < whole.size(); ++length)
    BOOST_TEST(!TuningTable::parse(whole.substr(0, length)), "cut after " << length);
  for (const char* line : {"forward float32 64 apple c99f1s1", "forward float32 65 apple staged",
                           "sideways float32 64 any staged", "forward", ""}) {
    BOOST_TEST(!TuningTable::parse("flashattn tuning 1\n" + std::string(line) + "\nend\n"), line);
  }
  BOOST_TEST(!TuningTable::parse("flashattn tuning 2\nend\n"));
}

BOOST_AUTO_TEST_CASE(the_schedule_takes_the_tables_choice) {
  DeviceFacts facts = facts_with(LaneMap::kApple);
  const KernelKey key{.kind = KernelKind::kForward, .head_tile = 64, .value_tile = 64};
  const TuningSlot slot{.kind = KernelKind::kForward, .apple = true};
  for (const TuningChoice& choice : candidates(slot)) {
    TuningTable table;
    table.set(slot, choice);
    facts.tuning = std::make_shared<const TuningTable>(table);
    const auto chosen = choose_register(key, 1 << 20, facts);
    BOOST_TEST(chosen.has_value() == choice.has_value());
    if (!chosen) continue;
    BOOST_TEST(chosen->block_columns == choice->columns);
    BOOST_TEST(chosen->registers.simdgroups == choice->simdgroups);
    BOOST_TEST(chosen->block_rows == 8 * choice->row_fragments * choice->simdgroups);
  }
}

BOOST_AUTO_TEST_SUITE_END()
