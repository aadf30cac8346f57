// MTLDevice: one simulated GPU of Apple family 8, and the functions that find it.
// FLASHATTN_SIMULATED_NO_DEVICE makes the machine one without a GPU; FLASHATTN_SIMULATED_FAMILY
// sets the newest Apple family that the device claims (default 8), for the host's decisions that
// depend on it.
#include "device/device.h"

#include <Metal/Metal.hpp>
#include <cstdlib>

#include "device/binary_archive.h"
#include "device/buffer.h"
#include "device/command_queue.h"
#include "device/event.h"
#include "device/pipeline.h"
#include "objc/autorelease.h"
#include "objc/collections.h"
#include "objc/register.h"

namespace simulated {

namespace {

class Device : public Object {
 public:
  Device() : Object("MTLDevice") {}
};

bool has_device() { return std::getenv("FLASHATTN_SIMULATED_NO_DEVICE") == nullptr; }

bool supports_family(MTL::GPUFamily family) {
  const char* given = std::getenv("FLASHATTN_SIMULATED_FAMILY");
  const long newest = MTL::GPUFamilyApple1 + (given == nullptr ? 8 : std::atol(given)) - 1;
  if (family >= MTL::GPUFamilyApple1 && family < MTL::GPUFamilyMac1) return family <= newest;
  return family == MTL::GPUFamilyMac2 || family == MTL::GPUFamilyCommon3 ||
         family == MTL::GPUFamilyMetal3;
}

void register_facts() {
  const char* const name = "MTLDevice";
  instance_method(name, "name",
                  [](Device*, SEL) { return autoreleased(new String("Simulated Apple GPU")); });
  instance_method(name, "hasUnifiedMemory", [](Device*, SEL) { return true; });
  instance_method(name, "isLowPower", [](Device*, SEL) { return false; });
  instance_method(name, "isRemovable", [](Device*, SEL) { return false; });
  instance_method(name, "registryID", [](Device*, SEL) { return std::uint64_t{1}; });
  instance_method(name, "maxThreadgroupMemoryLength", [](Device*, SEL) {
    return static_cast<NS::UInteger>(metal_sim::kMaxThreadgroupBytes);
  });
  instance_method(name, "maxThreadsPerThreadgroup", [](Device*, SEL) {
    return MTL::Size(metal_sim::kMaxThreadsPerThreadgroup, metal_sim::kMaxThreadsPerThreadgroup,
                     metal_sim::kMaxThreadsPerThreadgroup);
  });
  instance_method(name, "maxBufferLength",
                  [](Device*, SEL) { return static_cast<NS::UInteger>(kMaxBufferLength); });
  instance_method(name, "recommendedMaxWorkingSetSize",
                  [](Device*, SEL) { return static_cast<std::uint64_t>(kMaxBufferLength); });
  instance_method(name, "supportsFamily:", [](Device*, SEL, MTL::GPUFamily family) {
    return supports_family(family);
  });
}

}  // namespace

// Every call hands out a reference to the same one, as on a Mac.
Object* the_device() {
  static Device* const device = new Device;
  return device;
}

void register_device() {
  register_facts();
  const char* const name = "MTLDevice";
  instance_method(name, "newCommandQueue", [](Device*, SEL) { return make_command_queue(); });
  instance_method(name, "newEvent", [](Device*, SEL) { return new Event; });
  instance_method(name, "newBufferWithLength:options:",
                  [](Device*, SEL, NS::UInteger length, MTL::ResourceOptions) {
                    return Buffer::with_length(length);
                  });
  instance_method(name, "newBufferWithBytes:length:options:",
                  [](Device*, SEL, const void* bytes, NS::UInteger length, MTL::ResourceOptions) {
                    return Buffer::with_copy_of(bytes, length);
                  });
  instance_method(
      name, "newBufferWithBytesNoCopy:length:options:deallocator:",
      [](Device*, SEL, void* pointer, NS::UInteger length, MTL::ResourceOptions,
         Deallocator deallocator) { return Buffer::without_copy(pointer, length, deallocator); });
  instance_method(name, "newLibraryWithSource:options:error:",
                  [](Device*, SEL, String* source, CompileOptions* options, Error** error) {
                    return compile_library(source, options, error);
                  });
  instance_method(name, "newComputePipelineStateWithFunction:error:",
                  [](Device*, SEL, Function* function, Error** error) {
                    return make_pipeline(function, error);
                  });
  instance_method(name, "newComputePipelineStateWithDescriptor:options:reflection:error:",
                  [](Device*, SEL, PipelineDescriptor* descriptor, NS::UInteger options, Object**,
                     Error** error) { return make_pipeline(descriptor, options, error); });
  instance_method(name, "newBinaryArchiveWithDescriptor:error:",
                  [](Device*, SEL, BinaryArchiveDescriptor* descriptor, Error** error) {
                    return open_binary_archive(descriptor, error);
                  });
}

}  // namespace simulated

extern "C" {

MTL::Device* MTLCreateSystemDefaultDevice() {
  if (!simulated::has_device()) return nullptr;
  return reinterpret_cast<MTL::Device*>(simulated::retained(simulated::the_device()));
}

NS::Array* MTLCopyAllDevices() {
  auto* devices = new simulated::Array;
  if (simulated::has_device()) {
    devices->items.push_back(simulated::Ref<simulated::Object>::retaining(simulated::the_device()));
  }
  return reinterpret_cast<NS::Array*>(devices);
}

NS::Array* MTLCopyAllDevicesWithObserver(NS::Object**, MTL::DeviceNotificationHandlerBlock) {
  return MTLCopyAllDevices();
}

void MTLRemoveDeviceObserver(const NS::Object*) {}

}  // extern "C"
