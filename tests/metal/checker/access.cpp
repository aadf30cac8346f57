// Where an access goes, whether it may, and what it counts as. The race rule is in races.cpp.
#include "access.h"

#include <dlfcn.h>

#include <algorithm>

#include "../runtime/dispatch_state.h"
#include "../runtime/threadgroup.h"
#include "line_table.h"
#include "regions.h"

namespace metal_sim {

void AccessChecker::begin_dispatch() {
  // Modules differ between dispatches, and so do the meanings of addresses.
  locations_.clear();
  by_counter_.clear();
  by_source_.clear();
  recent_.fill({nullptr, 0});
  last_source_ = {nullptr, 0};
}

void AccessChecker::begin_threadgroup() {
  if (arena_cells_ != nullptr)
    std::fill_n(arena_cells_.get(), arena_used_ / kCellBytes + 2, Cell{});
  arena_used_ = 0;
  in_matrix_access_ = false;
  weak_threadgroup_ = weak_device_ = {nullptr, 0};
}

LocationId AccessChecker::location(const void* program_counter) {
  if (in_matrix_access_) return matrix_location_;
  auto& recent = recent_[(reinterpret_cast<std::uintptr_t>(program_counter) >> 2) % recent_.size()];
  if (recent.first == program_counter) return recent.second;
  auto [entry, is_new] = by_counter_.try_emplace(program_counter, 0);
  if (is_new) {
    locations_.push_back({program_counter, {nullptr, 0}});
    entry->second = static_cast<LocationId>(locations_.size());
  }
  recent = {program_counter, entry->second};
  return entry->second;
}

std::string AccessChecker::describe(LocationId id) {
  const Location& location = locations_[id - 1];
  if (location.source.file != nullptr) {
    const std::string path = location.source.file;
    return path.substr(path.rfind('/') + 1) + ":" + std::to_string(location.source.line);
  }
  Dl_info info;
  LineTable* lines = group_.dispatch().lines;
  if (lines == nullptr || dladdr(location.program_counter, &info) == 0) return "an unknown line";
  // A return address: the instruction before it made the access.
  const auto pc = reinterpret_cast<std::uintptr_t>(location.program_counter) - 1;
  return lines->describe(pc - reinterpret_cast<std::uintptr_t>(info.dli_fbase));
}

std::string AccessChecker::by_thread(std::uint32_t thread) const {
  return "thread " + std::to_string(thread) + " of threadgroup " + std::to_string(group_.index());
}

void AccessChecker::matrix_access_begin(const void* pointer, std::size_t bytes, bool store,
                                        abi::Source source) {
  in_matrix_access_ = true;
  if (source.line != last_source_.line || source.file != last_source_.file) {
    auto [entry, is_new] = by_source_.try_emplace({source.file, source.line}, 0);
    if (is_new) {
      locations_.push_back({nullptr, source});
      entry->second = static_cast<LocationId>(locations_.size());
    }
    last_source_ = source;
    matrix_location_ = entry->second;
  }
  if (group_.thread().index % 32u != 0) return;
  Counters& counters = group_.dispatch().counters;
  const bool threadgroup = group_.memory().contains(pointer);
  if (threadgroup) {
    ++(store ? counters.matrix_stores_threadgroup : counters.matrix_loads_threadgroup);
    counters.matrix_bytes_threadgroup += bytes;
  } else {
    ++(store ? counters.matrix_stores_device : counters.matrix_loads_device);
    counters.matrix_bytes_device += bytes;
  }
}

void AccessChecker::count_scalar(bool threadgroup, bool write, std::size_t bytes) {
  if (in_matrix_access_) return;
  Counters& counters = group_.dispatch().counters;
  if (threadgroup) {
    ++(write ? counters.scalar_stores_threadgroup : counters.scalar_loads_threadgroup);
    counters.scalar_bytes_threadgroup += bytes;
  } else {
    ++(write ? counters.scalar_stores_device : counters.scalar_loads_device);
    counters.scalar_bytes_device += bytes;
  }
}

void AccessChecker::access(const void* pointer, std::size_t bytes, bool write, bool atomic,
                           const void* program_counter) {
  if (group_.measuring() || group_.thread().fiber.on_stack(pointer)) return;
  Access access{static_cast<const char*>(pointer), bytes, write, atomic, 0, "", ""};
  if (group_.memory().contains(pointer)) {
    access.location = location(program_counter);
    threadgroup_access(access);
  } else if (group_.dispatch().regions != nullptr) {
    access.location = location(program_counter);
    device_access(access);
  }
}

void AccessChecker::threadgroup_access(Access& access) {
  access.space = "threadgroup";
  const ThreadgroupArray* array = group_.memory().find(access.pointer);
  if (array == nullptr || access.pointer + access.bytes > array->pointer + array->bytes) {
    const ThreadgroupArray* near =
        array != nullptr ? array : group_.memory().nearest(access.pointer);
    if (near == nullptr) return;
    report_bounds(access, near->name, access.pointer - near->pointer, near->bytes);
    return;
  }
  access.name = array->name;
  count_scalar(true, access.write, access.bytes);
  if (arena_cells_ == nullptr) arena_cells_ = make_cells(ThreadgroupMemory::kArenaBytes);
  const std::size_t offset = group_.memory().offset(access.pointer);
  arena_used_ = std::max(arena_used_, offset + access.bytes);
  Cell* cells = &arena_cells_[offset / kCellBytes];
  if (!access.write) {
    for (std::size_t i = 0; i * kCellBytes < access.bytes; ++i) {
      if (cells[i].initialised) continue;
      const std::string where = describe(access.location);
      group_.report("uninitialised|" + where + access.name,
                    std::string("uninitialised read of threadgroup '") + access.name + "' (byte " +
                        std::to_string(access.pointer - array->pointer) + ") at " + where + " by " +
                        by_thread(group_.thread().index));
      break;
    }
  }
  check_cells(cells, access, group_.epochs().threadgroup);
}

void AccessChecker::device_access(Access& access) {
  access.space = "device";
  DeviceRegions& regions = *group_.dispatch().regions;
  const Region* region = regions.find(access.pointer, access.bytes, access.write);
  if (region == nullptr) {
    Dl_info info;
    // Constant tables of the program live in its module.
    if (!access.write && dladdr(access.pointer, &info) != 0 && info.dli_fname != nullptr) return;
    const Region* near = regions.nearest(access.pointer);
    const bool any = near != nullptr;
    report_bounds(access, any ? near->name : "?", any ? access.pointer - near->begin : 0,
                  any ? near->bytes : 0);
    group_.stop();  // the access itself would touch foreign memory
  }
  access.name = region->name.c_str();
  if (!region->constant) count_scalar(false, access.write, access.bytes);
  if (access.write && !region->writable) {
    const std::string where = describe(access.location);
    group_.report("constant|" + where, "write to read-only buffer '" + region->name + "' at " +
                                           where + " by " + by_thread(group_.thread().index));
  }
  Cell* cells = regions.cell(access.pointer);
  if (cells != nullptr) check_cells(cells, access, group_.epochs().device);
}

void AccessChecker::report_bounds(const Access& access, const std::string& name,
                                  std::ptrdiff_t offset, std::size_t size) {
  const std::string where = describe(access.location);
  group_.report("bounds|" + where + name,
                std::string("out-of-bounds ") + (access.write ? "write" : "read") + " of " +
                    std::to_string(access.bytes) + " bytes in " + access.space + " memory at " +
                    where + ": byte " + std::to_string(offset) + " of '" + name + "', which has " +
                    std::to_string(size) + " bytes, by " + by_thread(group_.thread().index));
}

}  // namespace metal_sim
