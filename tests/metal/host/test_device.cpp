// Which devices and systems the Metal backend takes, and the reasons it gives for the others.
#include "metal/device.h"
#include "support.h"

namespace {

using flashattn::Support;
using flashattn::metal::choose_device;
using flashattn::metal::Device;
using flashattn::testing::contains;
using flashattn::testing::LiveObjectCheck;
using flashattn::testing::ScopedVariable;

BOOST_AUTO_TEST_SUITE(metal_device)

BOOST_AUTO_TEST_CASE(facts_come_from_the_device) {
  const LiveObjectCheck live;
  const Device device(choose_device());
  BOOST_TEST(device.facts().name == "Simulated Apple GPU");
  BOOST_TEST(device.facts().apple_family == 8);
  BOOST_TEST(device.facts().max_threadgroup_memory == 32768);
  BOOST_TEST(device.facts().max_threads_per_threadgroup == 1024);
  BOOST_TEST(device.facts().max_buffer_length > 0);
  BOOST_TEST(device.os_build() == "Version 14.0 (simulated)");
  BOOST_TEST(device.usable().ok);
}

BOOST_AUTO_TEST_CASE(an_old_system_is_refused_with_its_version) {
  const ScopedVariable old("FLASHATTN_SIMULATED_OS", "Version 12.6 (Build 21G115)");
  const Support support = Device(choose_device()).usable();
  BOOST_TEST(!support.ok);
  BOOST_TEST(contains(support.reason, "needs macOS 13 or later, this is Version 12.6"));
}

BOOST_AUTO_TEST_CASE(a_gpu_without_simdgroup_matrices_is_refused) {
  const ScopedVariable family("FLASHATTN_SIMULATED_FAMILY", "6");
  const Device device(choose_device());
  BOOST_TEST(device.facts().apple_family == 6);
  BOOST_TEST(!device.usable().ok);
  BOOST_TEST(contains(device.usable().reason, "they need Apple GPU family 7"));
}

BOOST_AUTO_TEST_CASE(no_gpu_is_no_device) {
  const ScopedVariable none("FLASHATTN_SIMULATED_NO_DEVICE", "1");
  BOOST_TEST(!choose_device());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
