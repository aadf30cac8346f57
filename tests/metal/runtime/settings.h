// The modes of the simulated device: the one place where the METAL_SIM_* environment variables are
// defined. Read once, at the first dispatch or compilation; set_setting() changes them afterwards
// (tests).
//
// - METAL_SIM_CHECK: 1 compiles kernels with the checker's hooks (default), 0 plain, about 3x
// faster.
// - METAL_SIM_MAP: element -> lane map of 8x8 matrices: row (default), column, apple,
//   apple_transposed, random:N, row_pair:N, adjacent:N, column_pair:N with a seed N.
// - METAL_SIM_SCHEDULE: order of a threadgroup's threads: fifo (default), lifo, random, priority.
// - METAL_SIM_SEED: seed of the random and priority schedules and of the threadgroup order (1).
// - METAL_SIM_SHUFFLE: 1 runs the threadgroups in an order drawn from the seed, 0 ascending
// (default).
// - METAL_SIM_REPORTS: file to which every checker report is appended, one a line.
// - METAL_SIM_CACHE: folder of compiled kernels (default: metal-sim in the user's cache folder).
// - METAL_SIM_COMPILER: clang command (default: zig's clang of METAL_SIM_PYTHON's ziglang package).
// - METAL_SIM_PYTHON: python that runs the translator (default: python3).
// - METAL_SIM_TRANSLATOR: folder of the translator (default: the one known at build time).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace metal_sim {

enum class Schedule { kFifo, kLifo, kRandom, kPriority };

struct Settings {
  bool check = true;
  std::string map = "row";
  Schedule schedule = Schedule::kFifo;
  std::uint64_t seed = 1;
  bool shuffle_threadgroups = false;
  std::string reports_file;
  std::string cache_folder;
  std::string compiler;
  std::string python;
  std::string translator;
};

// A copy, so that a change by another thread never tears a running dispatch.
Settings settings();

// Changes one setting by the lower-case name after METAL_SIM_ ("map", "schedule", ...). Throws
// std::invalid_argument.
void set_setting(std::string_view name, std::string_view value);

}  // namespace metal_sim
