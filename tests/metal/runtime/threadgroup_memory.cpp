// A bump allocator over one arena.
#include "threadgroup_memory.h"

#include <algorithm>
#include <cstring>

namespace metal_sim {
namespace {
constexpr std::size_t kBaseAlignment = 256;
constexpr unsigned char kPoison = 0xff;  // all bits set: a NaN in float, half and bfloat
}  // namespace

ThreadgroupMemory::ThreadgroupMemory() : storage_(new char[kArenaBytes + kBaseAlignment]) {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(storage_.get());
  base_ = storage_.get() + (kBaseAlignment - address % kBaseAlignment) % kBaseAlignment;
}

void ThreadgroupMemory::reset() {
  std::memset(base_, kPoison, used_);
  used_ = kGapBytes;
  declared_bytes_ = 0;
  arrays_.clear();
}

void* ThreadgroupMemory::declared(std::uint32_t site, std::size_t bytes, std::size_t alignment,
                                  const char* name) {
  for (const ThreadgroupArray& array : arrays_)
    if (array.site == site) return array.pointer;
  return allocate(bytes, std::max<std::size_t>(alignment, 16), site, name);
}

void* ThreadgroupMemory::argument(std::size_t bytes) {
  return allocate(bytes, 16, 0, "[[threadgroup(n)]]");
}

char* ThreadgroupMemory::allocate(std::size_t bytes, std::size_t alignment, std::uint32_t site,
                                  const char* name) {
  const std::size_t start = (used_ + alignment - 1) / alignment * alignment;
  if (start + bytes + kGapBytes > kArenaBytes) return nullptr;
  used_ = start + bytes + kGapBytes;
  declared_bytes_ += (bytes + 15) / 16 * 16;
  arrays_.push_back({base_ + start, bytes, site, name});
  return base_ + start;
}

const ThreadgroupArray* ThreadgroupMemory::find(const void* pointer) const {
  const char* p = static_cast<const char*>(pointer);
  for (const ThreadgroupArray& array : arrays_)
    if (p >= array.pointer && p < array.pointer + array.bytes) return &array;
  return nullptr;
}

const ThreadgroupArray* ThreadgroupMemory::nearest(const void* pointer) const {
  const char* p = static_cast<const char*>(pointer);
  const ThreadgroupArray* best = nullptr;
  std::ptrdiff_t best_distance = 0;
  for (const ThreadgroupArray& array : arrays_) {
    const std::ptrdiff_t distance =
        p < array.pointer ? array.pointer - p
                          : p - array.pointer - static_cast<std::ptrdiff_t>(array.bytes);
    if (best == nullptr || distance < best_distance) {
      best = &array;
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace metal_sim
