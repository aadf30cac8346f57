// The GPU: which one, what it can do, and its one command queue. Found once per process; nothing
// here throws, a machine without a usable GPU has no Device and a reason.
#pragma once

#include <sys/types.h>

#include <Metal/Metal.hpp>
#include <cstdint>
#include <string>

#include "flashattn/backend.h"
#include "metal/device_facts.h"

namespace flashattn::metal {

// Whether this build talks to the simulated device of tests/metal instead of a GPU.
#ifdef FLASHATTN_SIMULATED_METAL
inline constexpr bool kSimulated = true;
#else
inline constexpr bool kSimulated = false;
#endif

class Device {
 public:
  // `device` is owned from here on.
  explicit Device(NS::SharedPtr<MTL::Device> device);

  MTL::Device* handle() const { return device_.get(); }
  MTL::CommandQueue* queue() const { return queue_.get(); }
  const DeviceFacts& facts() const { return facts_; }
  // "Version 15.1 (Build 24B83)": compiled pipelines are only good for one.
  const std::string& os_build() const { return os_build_; }
  // Whether the system can compile the shaders (macOS 13), the GPU run them (family 7) and this
  // process reach it (it is no fork of the one that found the GPU), and why not.
  Support usable() const;

 private:
  NS::SharedPtr<MTL::Device> device_;
  NS::SharedPtr<MTL::CommandQueue> queue_;
  DeviceFacts facts_;
  std::string os_build_;
  std::int64_t os_major_ = 0;
  pid_t process_;
};

// The device to use, or null: the system's default one unless another has simdgroup matrices and it
// has not.
NS::SharedPtr<MTL::Device> choose_device();

// The newest Apple GPU family (7 is M1, 8 M2, 9 M3 and later) that the device supports, 0 for none.
int apple_family(MTL::Device* device);

}  // namespace flashattn::metal
