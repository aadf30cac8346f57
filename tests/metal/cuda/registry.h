// The kernels of all units, by host name and unit: filled by static objects in the units, read by
// the check program.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace metal_cuda {

struct ArgumentSlot {
  unsigned slot;      // BufferSlot of shaders/abi.h
  std::size_t bytes;  // of a parameter passed by value; 0 for a pointer
};

struct KernelEntry {
  const void* function = nullptr;
  std::vector<ArgumentSlot> arguments;
};

// By (host name, unit).
inline std::map<std::pair<std::string, std::string>, KernelEntry>& registry() {
  static std::map<std::pair<std::string, std::string>, KernelEntry> entries;
  return entries;
}

struct Registration {
  Registration(const char* name, const char* unit, const void* function,
               std::vector<ArgumentSlot> arguments) {
    registry()[{name, unit}] = KernelEntry{function, std::move(arguments)};
  }
};

}  // namespace metal_cuda
