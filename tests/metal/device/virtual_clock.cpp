// See virtual_clock.h.
#include "device/virtual_clock.h"

#include <algorithm>

namespace simulated {

namespace {

constexpr double kCores = 8;
constexpr double kCyclesPerSecond = 1.278e9;
constexpr double kSchedulers = 4;  // of a core, one simdgroup instruction a cycle each
constexpr double kLanes = 32;
// Issue slots of a simdgroup.
constexpr double kMultiply = 18;  // one 8x8x8 product
constexpr double kFragment = 1.25;
constexpr double kVote = 5;
constexpr double kShuffle = 2;
constexpr double kSimdgroupBarrier = 4;
constexpr double kThreadgroupBarrier = 8;
constexpr double kSpecial = 4;  // an exponential or logarithm of all lanes
// Bytes a cycle of one core.
constexpr double kThreadgroupRate = 64;
constexpr double kDeviceRate = 32;
// What starting a dispatch costs.
constexpr double kLaunchSeconds = 5e-6;

}  // namespace

double modelled_seconds(const metal_sim::Counters& counters,
                        const std::array<std::uint32_t, 3>& threads_per_threadgroup) {
  const auto count = [](std::uint64_t n) { return static_cast<double>(n); };
  double threads = 1;
  for (const std::uint32_t n : threads_per_threadgroup) threads *= std::max(n, 1U);
  const double simdgroups = std::max(1.0, threads / kLanes);
  double issue = kMultiply * count(counters.matrix_multiplies);
  issue +=
      kFragment * count(counters.matrix_loads_threadgroup + counters.matrix_stores_threadgroup +
                        counters.matrix_loads_device + counters.matrix_stores_device);
  issue +=
      kVote * count(counters.votes + counters.reductions) + kShuffle * count(counters.shuffles);
  issue += kSimdgroupBarrier * count(counters.simdgroup_barriers);
  issue += kThreadgroupBarrier * simdgroups * count(counters.threadgroup_barriers);
  issue += kSpecial * count(counters.exponentials + counters.logarithms) / kLanes;
  const double cycles =
      std::max({issue / kSchedulers, count(counters.matrix_bytes_threadgroup) / kThreadgroupRate,
                count(counters.matrix_bytes_device) / kDeviceRate});
  return kLaunchSeconds + cycles / (kCores * kCyclesPerSecond);
}

}  // namespace simulated
