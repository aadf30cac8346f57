// What the checker remembers about two bytes of memory: the last write and the last read, and
// whether a write ever happened. Two bytes and not four, because neighbouring half values belong to
// different threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace metal_sim {

constexpr std::size_t kCellBytes = 2;

// Number of a source location (Locations); 0 is none.
using LocationId = std::uint32_t;

// `run` is 1 + the number of the threadgroup; 0 means never. The epochs are those of the
// threadgroup's barriers and of the accessing thread's simdgroup barriers at the time of the
// access.
struct AccessRecord {
  std::uint32_t run = 0;
  std::uint32_t epoch = 0;
  std::uint32_t simdgroup_epoch = 0;
  LocationId location = 0;
  std::uint16_t thread = 0;
  bool atomic = false;
  bool several_lanes = false;  // reads: more than one lane of the last simdgroup, in this epoch
};

struct Cell {
  AccessRecord write;
  AccessRecord read;
  std::uint32_t reading_simdgroups = 0;  // bit per simdgroup that read in read.epoch
  bool initialised = false;
};

struct FreeDeleter {
  void operator()(void* pointer) const { std::free(pointer); }
};
// Zero bytes are a valid empty cell, so that untouched shadow pages cost nothing.
using CellArray = std::unique_ptr<Cell[], FreeDeleter>;

inline CellArray make_cells(std::size_t bytes) {
  const std::size_t count = bytes / kCellBytes + 2;
  return CellArray(static_cast<Cell*>(std::calloc(count, sizeof(Cell))));
}

}  // namespace metal_sim
