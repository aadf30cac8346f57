// MTLBuffer: memory of its own behind guard pages, or the caller's pages
// (newBufferWithBytesNoCopy).
#pragma once

#include <Metal/Metal.hpp>
#include <cstddef>

#include "objc/live_objects.h"
#include "objc/object.h"

extern "C" {

// An MTLBuffer for a test in Python, which has no metal-cpp: its owner, its memory, its end.
FLASHATTN_SIMULATED_EXPORT void* flashattn_simulated_new_buffer(std::size_t length);
FLASHATTN_SIMULATED_EXPORT void* flashattn_simulated_contents(void* buffer);
// From here on the buffer is one of MTLStorageModePrivate: it shows the host no contents.
FLASHATTN_SIMULATED_EXPORT void flashattn_simulated_make_private(void* buffer);
FLASHATTN_SIMULATED_EXPORT void flashattn_simulated_release(void* buffer);

}  // extern "C"

namespace simulated {

constexpr std::size_t kPageSize =
    16384;  // of Apple silicon, whatever the machine has that simulates it
constexpr std::size_t kMaxBufferLength = std::size_t{8} << 30;

using Deallocator = void (^)(void* pointer, NS::UInteger length);

class Buffer : public Object {
 public:
  // Fresh memory filled with NaN patterns: Metal promises no zeros.
  static Buffer* with_length(std::size_t length);
  static Buffer* with_copy_of(const void* bytes, std::size_t length);
  // Null, and a line on stderr, when pointer or length is no multiple of the page size.
  static Buffer* without_copy(void* pointer, std::size_t length, Deallocator deallocator);
  ~Buffer() override;

  std::byte* contents() const { return contents_; }
  std::size_t length() const { return length_; }
  bool is_private() const { return is_private_; }
  void make_private() { is_private_ = true; }

 private:
  Buffer() : Object("MTLBuffer") {}

  std::byte* contents_ = nullptr;
  std::size_t length_ = 0;   // bytes
  bool is_private_ = false;  // of MTLStorageModePrivate
  void* mapping_ = nullptr;  // null for the caller's memory
  std::size_t mapping_length_ = 0;
  const void* deallocator_ = nullptr;  // a heap block
};

}  // namespace simulated
