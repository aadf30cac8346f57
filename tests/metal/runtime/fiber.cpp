// Stack mapping, the initial frame that fiber.S pops, and the annotations AddressSanitizer wants.
#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#define METAL_SIM_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define METAL_SIM_ASAN 1
#endif
#endif
#ifdef METAL_SIM_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

extern "C" void metal_sim_switch(void** save, void* load);

namespace metal_sim {
namespace {

constexpr std::size_t kGuardBytes = 16 * 1024;  // a whole page for every page size in use
// Room to align the stack; pages never touched cost nothing.
constexpr std::size_t kMappingBytes = 2 * abi::kStackBlock + kGuardBytes;

}  // namespace

Fiber::~Fiber() {
  if (mapping_ != nullptr) munmap(mapping_, kMappingBytes);
}

void Fiber::prepare(void (*entry)()) {
  if (mapping_ == nullptr) {
    void* mapping = mmap(nullptr, kMappingBytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    mapping_ = static_cast<char*>(mapping);
    const std::uintptr_t lowest = reinterpret_cast<std::uintptr_t>(mapping_) + kGuardBytes;
    stack_ = mapping_ + kGuardBytes + (kStackBytes - lowest % kStackBytes) % kStackBytes;
    mprotect(stack_ - kGuardBytes, kGuardBytes, PROT_NONE);
  }
#ifdef METAL_SIM_ASAN
  // The frames of the last use were abandoned, not left: their red zones are still marked.
  ASAN_UNPOISON_MEMORY_REGION(stack_, kStackBytes);
#endif
  std::uintptr_t* top = reinterpret_cast<std::uintptr_t*>(stack_ + kStackBytes - 64);
#if defined(__x86_64__)
  // Six registers and the return address; the slot above it makes the stack look as after a call.
  top -= 8;
  std::memset(top, 0, 8 * sizeof(std::uintptr_t));
  top[6] = reinterpret_cast<std::uintptr_t>(entry);
#else
  // 160 bytes of registers; x30, the return address, is the twelfth.
  top -= 20;
  std::memset(top, 0, 20 * sizeof(std::uintptr_t));
  top[11] = reinterpret_cast<std::uintptr_t>(entry);
#endif
  stack_pointer_ = top;
}

void Fiber::continue_from(Fiber& from, bool from_ends) {
#ifdef METAL_SIM_ASAN
  void* fake_stack = nullptr;
  const void* bottom = stack_ != nullptr ? stack_ : asan_bottom_;
  const std::size_t bytes = stack_ != nullptr ? kStackBytes : asan_bytes_;
  __sanitizer_start_switch_fiber(from_ends ? nullptr : &fake_stack, bottom, bytes);
  metal_sim_switch(&from.stack_pointer_, stack_pointer_);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#else
  (void)from_ends;
  metal_sim_switch(&from.stack_pointer_, stack_pointer_);
#endif
}

void Fiber::entered(Fiber& self, Fiber& origin) {
#ifdef METAL_SIM_ASAN
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  // The first fiber of a threadgroup is entered from the OS thread: the only way to learn that
  // stack's bounds.
  if (origin.asan_bottom_ == nullptr) {
    origin.asan_bottom_ = bottom;
    origin.asan_bytes_ = bytes;
  }
#endif
  (void)self;
  (void)origin;
}

}  // namespace metal_sim
