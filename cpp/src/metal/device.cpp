// Choosing and describing the GPU; see device.h.
#include "metal/device.h"

#include <unistd.h>

#include <cassert>

#include "metal/objects.h"

namespace flashattn::metal {

namespace {

constexpr int kNewestFamily = 10;          // of the metal-cpp headers this is built with
constexpr std::int64_t kOldestMacOs = 13;  // Metal 3.0, the language version of the shaders
constexpr int kSimdgroupMatrices = 7;      // the first family that has them

DeviceFacts read_facts(MTL::Device* device) {
  const MTL::Size threads = device->maxThreadsPerThreadgroup();
  DeviceFacts facts;
  facts.name = to_std(device->name());
  facts.apple_family = apple_family(device);
  facts.max_threadgroup_memory = static_cast<std::int64_t>(device->maxThreadgroupMemoryLength());
  facts.max_threads_per_threadgroup = static_cast<int>(threads.width);
  facts.max_buffer_length = static_cast<std::int64_t>(device->maxBufferLength());
  return facts;
}

}  // namespace

int apple_family(MTL::Device* device) {
  for (int family = kNewestFamily; family >= 1; --family) {
    const auto value = static_cast<MTL::GPUFamily>(MTL::GPUFamilyApple1 + family - 1);
    if (device->supportsFamily(value)) return family;
  }
  return 0;
}

NS::SharedPtr<MTL::Device> choose_device() {
  const AutoreleaseScope scope;
  NS::SharedPtr<MTL::Device> chosen = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  if (chosen && apple_family(chosen.get()) >= kSimdgroupMatrices) return chosen;
  const NS::SharedPtr<NS::Array> all = NS::TransferPtr(MTL::CopyAllDevices());
  for (NS::UInteger i = 0; all && i < all->count(); ++i) {
    auto* device = all->object<MTL::Device>(i);
    if (apple_family(device) >= kSimdgroupMatrices) return NS::RetainPtr(device);
  }
  return chosen;
}

Device::Device(NS::SharedPtr<MTL::Device> device) : device_(std::move(device)), process_(getpid()) {
  assert(device_);
  const AutoreleaseScope scope;
  queue_ = NS::TransferPtr(device_->newCommandQueue());
  facts_ = read_facts(device_.get());
  NS::ProcessInfo* process = NS::ProcessInfo::processInfo();
  os_build_ = to_std(process->operatingSystemVersionString());
  os_major_ = process->operatingSystemVersion().majorVersion;
}

Support Device::usable() const {
  if (getpid() != process_) {
    return {.ok = false,
            .reason =
                "this process was forked from one that uses the GPU, and Metal does not "
                "survive a fork: start processes by spawn, or use backend \"cpu\" in them"};
  }
  if (!queue_) return {.ok = false, .reason = facts_.name + " gives no command queue"};
  if (os_major_ < kOldestMacOs) {
    return {.ok = false,
            .reason = "the metal backend needs macOS " + std::to_string(kOldestMacOs) +
                      " or later, this is " + os_build_};
  }
  if (facts_.apple_family < kSimdgroupMatrices) {
    return {
        .ok = false,
        .reason = facts_.name + " has no simdgroup matrices; they need Apple GPU family 7 (M1)"};
  }
  return {.ok = true, .reason = {}};
}

}  // namespace flashattn::metal
