// MTLBuffer's memory and methods.
#include "device/buffer.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "device/device.h"
#include "device/faults.h"
#include "objc/blocks.h"
#include "objc/register.h"
#include "objc/string.h"
#include "objc/validation.h"

namespace simulated {

namespace {

constexpr int kPoison = 0xff;  // NaN as float32, float16 and bfloat16

std::size_t round_up_to_pages(std::size_t length) {
  return (length + kPageSize - 1) / kPageSize * kPageSize;
}

}  // namespace

Buffer* Buffer::with_length(std::size_t length) {
  if (length == 0) fail_validation("newBufferWithLength: length must not be 0");
  if (length > kMaxBufferLength || refuses_allocation()) return nullptr;
  const std::size_t usable = round_up_to_pages(length);
  // Before the memory: slack to align to 16 KiB on a machine of 4 KiB pages. Behind it: a guard
  // page.
  const std::size_t total = usable + 3 * kPageSize;
  void* mapping =
      mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  const auto start =
      (reinterpret_cast<std::uintptr_t>(mapping) + 2 * kPageSize - 1) / kPageSize * kPageSize;
  auto* contents = reinterpret_cast<std::byte*>(start);
  if (mprotect(contents, usable, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping, total);
    return nullptr;
  }
  std::memset(contents, kPoison, length);
  auto* buffer = new Buffer;
  buffer->contents_ = contents;
  buffer->length_ = length;
  buffer->mapping_ = mapping;
  buffer->mapping_length_ = total;
  return buffer;
}

Buffer* Buffer::with_copy_of(const void* bytes, std::size_t length) {
  Buffer* buffer = with_length(length);
  if (buffer != nullptr) std::memcpy(buffer->contents_, bytes, length);
  return buffer;
}

Buffer* Buffer::without_copy(void* pointer, std::size_t length, Deallocator deallocator) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (address == 0 || address % kPageSize != 0 || length == 0 || length % kPageSize != 0) {
    std::fprintf(
        stderr,
        "simulated Metal: newBufferWithBytesNoCopy: pointer %p and length %zu must be multiples of "
        "the page size %zu\n",
        pointer, length, kPageSize);
    return nullptr;
  }
  if (refuses_adoption()) return nullptr;
  auto* buffer = new Buffer;
  buffer->contents_ = static_cast<std::byte*>(pointer);
  buffer->length_ = length;
  buffer->deallocator_ = _Block_copy(reinterpret_cast<const void*>(deallocator));
  return buffer;
}

Buffer::~Buffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_length_);
  if (deallocator_ == nullptr) return;
  auto call = reinterpret_cast<Deallocator>(const_cast<void*>(deallocator_));
  call(contents_, length_);
  _Block_release(deallocator_);
}

void register_buffer() {
  const char* const name = "MTLBuffer";
  instance_method(name, "contents", [](Buffer* self, SEL) -> void* {
    return self->is_private() ? nullptr : self->contents();
  });
  instance_method(name, "length",
                  [](Buffer* self, SEL) { return static_cast<NS::UInteger>(self->length()); });
  instance_method(name, "device", [](Buffer*, SEL) { return the_device(); });
  instance_method(name, "setLabel:", [](Buffer*, SEL, String*) {});
  instance_method(name, "storageMode", [](Buffer* self, SEL) {
    return self->is_private() ? MTL::StorageModePrivate : MTL::StorageModeShared;
  });
  instance_method(name, "gpuAddress", [](Buffer* self, SEL) {
    return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(self->contents()));
  });
}

}  // namespace simulated

extern "C" {

void* flashattn_simulated_new_buffer(std::size_t length) {
  return simulated::Buffer::with_length(length);
}

void* flashattn_simulated_contents(void* buffer) {
  return static_cast<simulated::Buffer*>(buffer)->contents();
}

void flashattn_simulated_make_private(void* buffer) {
  static_cast<simulated::Buffer*>(buffer)->make_private();
}

void flashattn_simulated_release(void* buffer) {
  simulated::release(static_cast<simulated::Buffer*>(buffer));
}

}  // extern "C"
