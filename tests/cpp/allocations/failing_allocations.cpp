// See failing_allocations.h. The linker sends the library's aligned_alloc and free here
// (--wrap=aligned_alloc, --wrap=free); blocks of operator new go to malloc.
#include "allocations/failing_allocations.h"

#include <atomic>
#include <cstdlib>
#include <new>

extern "C" {
void* __real_aligned_alloc(std::size_t alignment, std::size_t bytes);
void __real_free(void* block);
}

namespace {

std::atomic<long> to_come{0};
std::atomic<long> live{0};

bool fails() {
  long n = to_come.load(std::memory_order_relaxed);
  while (n > 0 && !to_come.compare_exchange_weak(n, n - 1, std::memory_order_relaxed)) {
  }
  return n == 1;
}

void* counted(void* block) {
  if (block != nullptr) live.fetch_add(1, std::memory_order_relaxed);
  return block;
}

void give_back(void* block) {
  if (block != nullptr) live.fetch_sub(1, std::memory_order_relaxed);
  __real_free(block);
}

}  // namespace

namespace flashattn::testing {

void fail_request(long n) { to_come.store(n, std::memory_order_relaxed); }

bool is_waiting() { return to_come.load(std::memory_order_relaxed) != 0; }

long live_blocks() { return live.load(std::memory_order_relaxed); }

}  // namespace flashattn::testing

extern "C" {

void* __wrap_aligned_alloc(std::size_t alignment, std::size_t bytes) {
  return fails() ? nullptr : counted(__real_aligned_alloc(alignment, bytes));
}

void __wrap_free(void* block) { give_back(block); }
}

void* operator new(std::size_t bytes) {
  void* const block = fails() ? nullptr : counted(std::malloc(bytes == 0 ? 1 : bytes));
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

void* operator new(std::size_t bytes, std::align_val_t alignment) {
  const auto step = static_cast<std::size_t>(alignment);
  const std::size_t rounded = (bytes / step + 1) * step;
  void* const block = fails() ? nullptr : counted(__real_aligned_alloc(step, rounded));
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

void operator delete(void* block) noexcept { give_back(block); }
void operator delete(void* block, std::size_t) noexcept { give_back(block); }
void operator delete(void* block, std::align_val_t) noexcept { give_back(block); }
void operator delete(void* block, std::size_t, std::align_val_t) noexcept { give_back(block); }
