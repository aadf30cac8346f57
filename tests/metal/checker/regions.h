// The device and constant memory of one dispatch: what may be accessed, what may be written, and
// its shadow.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "shadow.h"

namespace metal_sim {

struct Region {
  char* begin = nullptr;
  std::size_t bytes = 0;
  bool writable = false;
  bool constant = false;  // constant address space: not device traffic
  std::string name;

  bool contains(const char* p, std::size_t n) const { return p >= begin && p + n <= begin + bytes; }
};

// Regions that overlap share one span and so one shadow: a buffer bound twice races with itself.
struct Span {
  char* begin = nullptr;
  char* end = nullptr;
  CellArray cells;  // null when nothing in the span may be written
};

class DeviceRegions {
 public:
  void add(Region region) { regions_.push_back(std::move(region)); }
  void build_spans();
  // The region that holds the bytes; for a write a writable one if there is any. nullptr: out of
  // bounds.
  const Region* find(const void* pointer, std::size_t bytes, bool write) const;
  const Region* nearest(const void* pointer) const;
  // Shadow of the byte, or nullptr.
  Cell* cell(const void* pointer);

 private:
  std::vector<Region> regions_;
  std::vector<Span> spans_;
};

}  // namespace metal_sim
