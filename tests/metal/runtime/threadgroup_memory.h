// The memory of one threadgroup: arrays declared in the kernel and [[threadgroup(n)]] arguments,
// with gaps between them, refilled with a NaN pattern for every threadgroup so that uninitialised
// reads show in results too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace metal_sim {

struct ThreadgroupArray {
  char* pointer = nullptr;
  std::size_t bytes = 0;
  std::uint32_t site = 0;  // number of the declaration; 0 for an argument
  const char* name = "";
};

class ThreadgroupMemory {
 public:
  static constexpr std::size_t kArenaBytes = 128 * 1024;
  static constexpr std::size_t kGapBytes = 256;

  ThreadgroupMemory();
  void reset();
  // The array of this declaration, allocated when the first thread reaches it. nullptr: the arena
  // is full.
  void* declared(std::uint32_t site, std::size_t bytes, std::size_t alignment, const char* name);
  void* argument(std::size_t bytes);

  bool contains(const void* pointer) const {
    const char* p = static_cast<const char*>(pointer);
    return p >= base_ && p < base_ + kArenaBytes;
  }
  std::size_t offset(const void* pointer) const {
    return static_cast<std::size_t>(static_cast<const char*>(pointer) - base_);
  }
  // The array that holds the byte, or nullptr.
  const ThreadgroupArray* find(const void* pointer) const;
  // The array whose end or start is nearest: for messages.
  const ThreadgroupArray* nearest(const void* pointer) const;
  // Bytes asked for, each array rounded up to 16 as Metal does.
  std::size_t declared_bytes() const { return declared_bytes_; }

 private:
  char* allocate(std::size_t bytes, std::size_t alignment, std::uint32_t site, const char* name);

  std::unique_ptr<char[]> storage_;
  char* base_ = nullptr;
  std::size_t used_ = kArenaBytes;
  std::size_t declared_bytes_ = 0;
  std::vector<ThreadgroupArray> arrays_;
};

}  // namespace metal_sim
