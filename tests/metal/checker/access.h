// Checks every memory access of a checked kernel: bounds, read-only buffers, uninitialised
// threadgroup memory, and races found from barrier epochs, whatever the order in which the threads
// happen to run. One per Threadgroup. In a module without hooks only the matrix loads and stores
// are seen, and counted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../runtime/kernel_abi.h"
#include "shadow.h"

namespace metal_sim {

class Threadgroup;

class AccessChecker {
 public:
  explicit AccessChecker(Threadgroup& threadgroup) : group_(threadgroup) {}

  void begin_dispatch();
  void begin_threadgroup();
  void barrier_passed(abi::BarrierScope scope, int flags, abi::Source source);
  void access(const void* pointer, std::size_t bytes, bool write, bool atomic,
              const void* program_counter);
  void matrix_access_begin(const void* pointer, std::size_t bytes, bool store, abi::Source source);
  void matrix_access_end() { in_matrix_access_ = false; }

 private:
  struct Access {
    const char* pointer;
    std::size_t bytes;
    bool write;
    bool atomic;
    LocationId location;
    const char* space;  // "threadgroup" or "device"
    const char* name;   // of the array or buffer
  };

  void threadgroup_access(Access& access);
  void device_access(Access& access);
  void check_cells(Cell* cells, const Access& access, std::uint32_t epoch);
  void check_cell(Cell& cell, const Access& access, AccessRecord now);
  bool unordered(const AccessRecord& before, const AccessRecord& now) const;
  bool read_races(const Cell& cell, const AccessRecord& now) const;
  void remember(Cell& cell, bool write, const AccessRecord& now) const;
  void report_race(const Access& access, const AccessRecord& before, const char* earlier);
  void report_bounds(const Access& access, const std::string& name, std::ptrdiff_t offset,
                     std::size_t size);
  void count_scalar(bool threadgroup, bool write, std::size_t bytes);
  std::string by_thread(std::uint32_t thread) const;
  std::string describe(LocationId location);
  LocationId location(const void* program_counter);

  Threadgroup& group_;
  CellArray arena_cells_;
  std::size_t arena_used_ = 0;
  bool in_matrix_access_ = false;
  abi::Source last_source_{nullptr, 0};
  LocationId matrix_location_ = 0;  // of last_source_
  // Locations by number - 1: an address in the module, or a line given by the kernel itself.
  struct Location {
    const void* program_counter = nullptr;
    abi::Source source{nullptr, 0};
  };
  std::vector<Location> locations_;
  std::map<const void*, LocationId> by_counter_;
  std::map<std::pair<const char*, int>, LocationId> by_source_;
  // A direct-mapped cache of by_counter_: a loop alternates between few program counters.
  std::array<std::pair<const void*, LocationId>, 256> recent_{};
  // Barriers whose mem_flags left out an address space since the last one that named it, for the
  // message.
  abi::Source weak_threadgroup_{nullptr, 0};
  abi::Source weak_device_{nullptr, 0};
};

}  // namespace metal_sim
