// See counting.h. Blocks of operator new go to malloc; locks go on to the C library.
#include "overhead/counting.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "objc/driver_code.h"
#include "objc/live_objects.h"

namespace {

thread_local bool counts = false;
thread_local flashattn::testing::Asked asked;

bool is_counted() { return counts && flashattn_simulated_in_driver() == 0; }

void* allocate(std::size_t bytes) {
  if (is_counted()) ++asked.allocations;
  void* const block = std::malloc(bytes == 0 ? 1 : bytes);
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

}  // namespace

namespace flashattn::testing {

void start_counting() {
  asked = {.messages = -flashattn_simulated_messages(),
           .objects = -flashattn_simulated_made_objects()};
  counts = true;
}

Asked stop_counting() {
  counts = false;
  asked.messages += flashattn_simulated_messages();
  asked.objects += flashattn_simulated_made_objects();
  return asked;
}

}  // namespace flashattn::testing

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  if (is_counted()) ++asked.allocations;
  const auto step = static_cast<std::size_t>(alignment);
  void* const block = std::aligned_alloc(step, (bytes + step - 1) / step * step);
  if (block == nullptr) throw std::bad_alloc();
  return block;
}
void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, std::size_t) noexcept { std::free(block); }
void operator delete(void* block, std::align_val_t) noexcept { std::free(block); }
void operator delete(void* block, std::size_t, std::align_val_t) noexcept { std::free(block); }

// The program's own definition comes before the C library's. No function-local static: making one
// locks a mutex.
extern "C" int pthread_mutex_lock(pthread_mutex_t* mutex) {
  using Lock = int (*)(pthread_mutex_t*);
  static std::atomic<Lock> found{nullptr};
  Lock next = found.load();
  if (next == nullptr) {
    next = reinterpret_cast<Lock>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
    found = next;
  }
  if (is_counted()) ++asked.locks;
  return next(mutex);
}
