// An MTLBuffer behind SharedMemory; see shared_memory.h.
#include "metal/shared_memory.h"

#include <Metal/Metal.hpp>
#include <algorithm>
#include <string>

#include "flashattn/error.h"
#include "metal/objects.h"

namespace flashattn::metal {

SharedMemory::SharedMemory(void* like, std::size_t bytes) : bytes_(bytes) {
  const AutoreleaseScope scope;
  MTL::Device* device = static_cast<MTL::Buffer*>(like)->device();
  // Metal has no empty buffers.
  MTL::Buffer* made =
      device->newBuffer(std::max<std::size_t>(bytes, 1), MTL::ResourceStorageModeShared);
  if (made == nullptr) {
    throw DeviceError("metal: an array of " + std::to_string(bytes) + " bytes cannot be allocated");
  }
  buffer_ = made;
  contents_ = made->contents();
}

SharedMemory::~SharedMemory() { static_cast<MTL::Buffer*>(buffer_)->release(); }

}  // namespace flashattn::metal
