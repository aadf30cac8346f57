// Memory that the GPU and the host share: what a caller whose arrays are Metal's gets results in.
// No Metal type appears here, so that the Python binding needs no metal-cpp.
#pragma once

#include <cstddef>

namespace flashattn::metal {

class SharedMemory {
 public:
  // At least `bytes` of undefined content on the device of `like`, an MTLBuffer. Throws DeviceError
  // when the device has not that much.
  SharedMemory(void* like, std::size_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void* handle() const { return buffer_; }  // the MTLBuffer; its memory starts at offset 0
  void* contents() const { return contents_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void* buffer_ = nullptr;
  void* contents_ = nullptr;
  std::size_t bytes_;
};

}  // namespace flashattn::metal
