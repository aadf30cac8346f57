// Reads the affinity mask, sysfs core lists and cgroup files; every file that cannot be read counts
// as no limit.
#include "cpu/cpu_count.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace flashattn::cpu {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// CPUs of a quota of `quota` us per `period` us, rounded up; 0 when there is no quota.
int cpus_of_quota(std::int64_t quota, std::int64_t period) {
  if (quota <= 0 || period <= 0) return 0;
  return static_cast<int>(std::min<std::int64_t>((quota + period - 1) / period, 1 << 20));
}

// cgroup v2: "max 100000" or "150000 100000".
int quota_v2(const std::string& directory) {
  std::istringstream line(first_line(directory + "/cpu.max"));
  std::int64_t quota = 0;
  std::int64_t period = 0;
  return line >> quota >> period ? cpus_of_quota(quota, period) : 0;
}

// cgroup v1: one number per file, -1 for no quota.
int quota_v1(const std::string& directory) {
  std::istringstream quota_line(first_line(directory + "/cpu.cfs_quota_us"));
  std::istringstream period_line(first_line(directory + "/cpu.cfs_period_us"));
  std::int64_t quota = 0;
  std::int64_t period = 0;
  return quota_line >> quota && period_line >> period ? cpus_of_quota(quota, period) : 0;
}

// The tightest quota of the group `path` and of every group above it. Inside a container the path
// may be the host's and not exist under `root`; the root itself is then the container's own group.
int tightest_quota(const std::string& root, std::string path, int (*quota)(const std::string&)) {
  int limit = 0;
  for (;;) {
    const int here = quota(root + path);
    if (here > 0) limit = limit == 0 ? here : std::min(limit, here);
    if (path.empty()) return limit;
    const std::size_t slash = path.find_last_of('/');
    path.erase(slash == std::string::npos ? 0 : slash);
  }
}

#if defined(__linux__)
// The set of hardware threads that share the core of `cpu`, as sysfs writes it: equal text is the
// same core.
std::string core_of(int cpu) {
  const std::string text = first_line("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                                      "/topology/thread_siblings_list");
  return text.empty() ? "cpu" + std::to_string(cpu) : text;
}

int cores_in_affinity_mask() {
  // The kernel refuses a set smaller than its own, so grow until it fits.
  for (int cpus = CPU_SETSIZE; cpus <= (1 << 20); cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<std::size_t>(cpus));
    if (set == nullptr) return 0;
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(cpus));
    CPU_ZERO_S(bytes, set);
    std::set<std::string> cores;
    const bool fits = sched_getaffinity(0, bytes, set) == 0;
    for (int cpu = 0; fits && cpu < cpus; ++cpu) {
      if (CPU_ISSET_S(static_cast<std::size_t>(cpu), bytes, set)) cores.insert(core_of(cpu));
    }
    CPU_FREE(set);
    if (fits) return static_cast<int>(cores.size());
  }
  return 0;
}
#endif

}  // namespace

int cgroup_cpu_limit(const std::string& cgroup_file, const std::string& mount_root) {
  std::ifstream file(cgroup_file);
  int limit = 0;
  // Lines read "hierarchy-id:controllers:path"; version 2 is the one without controllers.
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    int here = 0;
    if (controllers == ",,") {
      here = tightest_quota(mount_root, path, quota_v2);
    } else if (controllers.find(",cpu,") != std::string::npos) {
      here = tightest_quota(mount_root + "/cpu", path, quota_v1);
    }
    if (here > 0) limit = limit == 0 ? here : std::min(limit, here);
  }
  return limit;
}

int usable_cores() {
  int cores = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
  const int in_mask = cores_in_affinity_mask();
  if (in_mask > 0) cores = in_mask;
  const int limit = cgroup_cpu_limit("/proc/self/cgroup", "/sys/fs/cgroup");
  if (limit > 0) cores = std::min(cores, limit);
#endif
  return std::max(cores, 1);
}

}  // namespace flashattn::cpu
