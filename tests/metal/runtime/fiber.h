// Fibers: stacks that one OS thread switches between. Relies on fiber.S; knows nothing of kernels
// or scheduling.
#pragma once

#include <cstddef>

#include "kernel_abi.h"

namespace metal_sim {

class Fiber {
 public:
  // The OS thread's own stack: it only saves and is switched back to.
  Fiber() = default;
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes the next switch to this fiber start `entry`, which must never return. The stack is kept
  // between uses.
  void prepare(void (*entry)());

  // Suspends `from`, which must be the running fiber, and continues this one. `from_ends` says that
  // nobody will continue `from` again before its next prepare().
  void continue_from(Fiber& from, bool from_ends);

  // First thing in an entry function, and only there.
  static void entered(Fiber& self, Fiber& origin);

  bool on_stack(const void* pointer) const {
    const char* p = static_cast<const char*>(pointer);
    return p >= stack_ && p < stack_ + kStackBytes;
  }

 private:
  static constexpr std::size_t kStackBytes = abi::kStackBlock;

  void* stack_pointer_ = nullptr;
  char* stack_ = nullptr;    // lowest usable byte; nullptr for the OS thread's stack
  char* mapping_ = nullptr;  // holds stack_ and a guard page below it
  // Bounds of the OS thread's stack, for AddressSanitizer.
  [[maybe_unused]] const void* asan_bottom_ = nullptr;
  [[maybe_unused]] std::size_t asan_bytes_ = 0;
};

}  // namespace metal_sim
