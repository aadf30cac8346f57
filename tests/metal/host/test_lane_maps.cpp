// The lane map: what the host makes of one, what it asks the device, and what a kernel's complaint
// or the environment changes.
#include <algorithm>
#include <utility>

#include "flashattn/error.h"
#include "metal/lane_maps.h"
#include "runtime/settings.h"
#include "support.h"

namespace {

using flashattn::DType;
using flashattn::metal::AutoreleaseScope;
using flashattn::metal::choose_device;
using flashattn::metal::classify;
using flashattn::metal::LaneMap;
using flashattn::metal::LaneMaps;
using flashattn::metal::LanePositions;
using flashattn::testing::contains;
using flashattn::testing::ScopedVariable;

constexpr const char* kVariable = "FLASHATTN_METAL_KERNELS";

LanePositions row_by_row() {
  LanePositions positions{};
  for (std::uint32_t i = 0; i < positions.size(); ++i) positions[i] = i;
  return positions;
}

// A simulated GPU of one map.
struct Gpu {
  const AutoreleaseScope scope;
  flashattn::metal::Device device{choose_device()};
  flashattn::metal::PipelineCache pipelines{device.handle(), {}};
  flashattn::metal::BufferPool pool{device.handle(), 1 << 20};
  LaneMaps maps{&device, &pipelines, &pool};
  std::string map_before = metal_sim::settings().map;
  ~Gpu() { metal_sim::set_setting("map", map_before); }
};

}  // namespace

BOOST_AUTO_TEST_SUITE(metal_lane_maps)

BOOST_AUTO_TEST_CASE(a_map_is_a_permutation_that_both_types_share) {
  const LanePositions rows = row_by_row();
  BOOST_TEST((classify(rows, rows) == LaneMap::kAny));
  LanePositions twice = rows;
  twice[3] = twice[4];
  BOOST_TEST((classify(twice, twice) == LaneMap::kUnknown));
  LanePositions outside = rows;
  outside[3] = 64;
  BOOST_TEST((classify(outside, outside) == LaneMap::kUnknown));
  LanePositions other = rows;
  std::swap(other[0], other[1]);
  BOOST_TEST((classify(other, other) == LaneMap::kAny));
  BOOST_TEST((classify(other, rows) == LaneMap::kUnknown));
}

BOOST_FIXTURE_TEST_CASE(the_device_is_asked_once, Gpu) {
  const ScopedVariable chosen(kVariable, "register");
  metal_sim::set_setting("map", "apple");
  BOOST_TEST((maps.facts().float_map == LaneMap::kApple));
  BOOST_TEST((maps.facts().half_map == LaneMap::kApple));
  metal_sim::set_setting("map", "random:3");
  BOOST_TEST((maps.facts().float_map == LaneMap::kApple));
  flashattn::metal::forget_lane_maps();
  BOOST_TEST((maps.facts().float_map == LaneMap::kAny));
  BOOST_TEST(pipelines.compiled() == 2);  // the probes of float and half, once each
}

BOOST_FIXTURE_TEST_CASE(a_complaint_leads_to_the_next_weaker_choice, Gpu) {
  metal_sim::set_setting("map", "apple");
  const auto float_map = [&] { return maps.facts().float_map; };
  BOOST_TEST((float_map() == LaneMap::kApple));
  maps.demote(DType::kBFloat16, LaneMap::kApple, "a test");
  BOOST_TEST((float_map() == LaneMap::kAny));
  maps.demote(DType::kFloat32, LaneMap::kApple, "a test");  // of a call that began before
  BOOST_TEST((float_map() == LaneMap::kAny));
  maps.demote(DType::kFloat32, LaneMap::kAny, "a test");
  BOOST_TEST((float_map() == LaneMap::kUnknown));
  BOOST_TEST((maps.facts().half_map == LaneMap::kApple));
  BOOST_TEST(contains(maps.describe(), "staged kernels"), maps.describe());
  BOOST_TEST(contains(maps.describe(), "float16: register kernels"), maps.describe());
}

BOOST_FIXTURE_TEST_CASE(the_environment_decides, Gpu) {
  metal_sim::set_setting("map", "apple");
  {
    const ScopedVariable staged(kVariable, "staged");
    BOOST_TEST((maps.facts().float_map == LaneMap::kUnknown));
    BOOST_TEST(pipelines.compiled() == 0);
    BOOST_TEST(contains(maps.describe(), kVariable), maps.describe());
  }
  {
    const ScopedVariable any(kVariable, "any");
    BOOST_TEST((maps.facts().float_map == LaneMap::kAny));
  }
  const ScopedVariable wrong(kVariable, "fastest");
  BOOST_CHECK_THROW(maps.facts(), flashattn::InvalidArgument);
}

BOOST_AUTO_TEST_SUITE_END()
