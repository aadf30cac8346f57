// The __tsan_* functions that -fsanitize=thread makes a kernel call before its memory accesses,
// forwarded to the runtime's checker. Linked into every checked module in place of the sanitizer's
// own library; must itself be compiled without instrumentation.
#include "../runtime/kernel_abi.h"

namespace metal_sim {
extern const abi::Runtime* runtime __attribute__((visibility("hidden")));
}

namespace {
inline void access(const void* pointer, size_t bytes, bool write, const void* program_counter) {
  // The kernel's own variables, by far the most of all accesses.
  const uintptr_t here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  if ((reinterpret_cast<uintptr_t>(pointer) ^ here) < metal_sim::abi::kStackBlock) return;
  metal_sim::runtime->access(pointer, bytes, write, false, program_counter);
}
}  // namespace

extern "C" {

void __tsan_init() {}

#define METAL_SIM_HOOKS(size)                                                              \
  void __tsan_read##size(void* p) { access(p, size, false, __builtin_return_address(0)); } \
  void __tsan_write##size(void* p) { access(p, size, true, __builtin_return_address(0)); } \
  void __tsan_unaligned_read##size(void* p) {                                              \
    access(p, size, false, __builtin_return_address(0));                                   \
  }                                                                                        \
  void __tsan_unaligned_write##size(void* p) {                                             \
    access(p, size, true, __builtin_return_address(0));                                    \
  }                                                                                        \
  void __tsan_read_write##size(void* p) {                                                  \
    access(p, size, false, __builtin_return_address(0));                                   \
    access(p, size, true, __builtin_return_address(0));                                    \
  }                                                                                        \
  void __tsan_unaligned_read_write##size(void* p) {                                        \
    access(p, size, false, __builtin_return_address(0));                                   \
    access(p, size, true, __builtin_return_address(0));                                    \
  }
METAL_SIM_HOOKS(1)
METAL_SIM_HOOKS(2)
METAL_SIM_HOOKS(4)
METAL_SIM_HOOKS(8)
METAL_SIM_HOOKS(16)

void __tsan_read_range(void* p, size_t bytes) {
  access(p, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t bytes) {
  access(p, bytes, true, __builtin_return_address(0));
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

void* __tsan_memcpy(void* destination, const void* source, size_t bytes) {
  access(source, bytes, false, __builtin_return_address(0));
  access(destination, bytes, true, __builtin_return_address(0));
  return __builtin_memcpy(destination, source, bytes);
}
void* __tsan_memmove(void* destination, const void* source, size_t bytes) {
  access(source, bytes, false, __builtin_return_address(0));
  access(destination, bytes, true, __builtin_return_address(0));
  return __builtin_memmove(destination, source, bytes);
}
void* __tsan_memset(void* destination, int value, size_t bytes) {
  access(destination, bytes, true, __builtin_return_address(0));
  return __builtin_memset(destination, value, bytes);
}

}  // extern "C"
