// How many threads this process may run at once: cores in its affinity mask, cut by a cgroup CPU
// quota. Linux reads sched_getaffinity, sysfs and cgroup v1 / v2 files; other systems ask the
// standard library.
#pragma once

#include <string>

namespace flashattn::cpu {

// At least 1. Hardware threads of one core count once: a second one adds nothing to code that fills
// the multiply-add ports, and halves its cache.
int usable_cores();

// CPUs that a cgroup quota allows, rounded up; 0 is no limit. `cgroup_file` is /proc/self/cgroup
// and `mount_root` is /sys/fs/cgroup; tests pass made-up trees.
int cgroup_cpu_limit(const std::string& cgroup_file, const std::string& mount_root);

}  // namespace flashattn::cpu
