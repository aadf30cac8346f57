// Aligned blocks, the per-thread buffer and the cache behind Workspace. Lock-free, so that a child
// forked while another thread allocates cannot find a lock held forever.
#include "cpu/scratch.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace flashattn::cpu {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// `bytes` is rounded up in place. Large blocks ask for huge pages: cold 4 KiB pages cost more than
// the arithmetic of a short problem.
std::byte* allocate(std::size_t& bytes) {
  const std::size_t alignment = bytes >= kHugePage ? kHugePage : kScratchAlignment;
  if (bytes > ~std::size_t{0} - alignment) throw std::bad_alloc();
  bytes = round_up(bytes == 0 ? 1 : bytes, alignment);
  void* block = std::aligned_alloc(alignment, bytes);
  if (block == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  // Only advice: a kernel without huge pages refuses, and the block is as good.
  if (alignment == kHugePage) (void)madvise(block, bytes, MADV_HUGEPAGE);
#endif
  return static_cast<std::byte*>(block);
}

struct ThreadBuffer {
  std::byte* data = nullptr;
  std::size_t bytes = 0;

  ThreadBuffer() = default;
  ThreadBuffer(const ThreadBuffer&) = delete;
  ThreadBuffer& operator=(const ThreadBuffer&) = delete;
  ~ThreadBuffer() { release(); }

  void release() {
    std::free(data);
    data = nullptr;
    bytes = 0;
  }
};

thread_local ThreadBuffer thread_buffer;

// A cached block holds its own size in its first bytes.
std::array<std::atomic<std::byte*>, static_cast<std::size_t>(kKeptWorkspaces)> cached_blocks{};

std::size_t& stored_bytes(std::byte* block) { return *reinterpret_cast<std::size_t*>(block); }

// Keeps the block in a free slot, else in the place of another one.
void give_back(std::byte* block, std::size_t bytes) {
  if (bytes > kKeptWorkspaceBytes) {
    std::free(block);
    return;
  }
  stored_bytes(block) = bytes;
  for (auto& slot : cached_blocks) {
    std::byte* empty = nullptr;
    if (slot.compare_exchange_strong(empty, block, std::memory_order_acq_rel)) return;
  }
  static std::atomic<unsigned> next_victim{0};
  const unsigned victim = next_victim.fetch_add(1, std::memory_order_relaxed);
  auto& slot = cached_blocks[victim % cached_blocks.size()];
  std::free(slot.exchange(block, std::memory_order_acq_rel));
}

// The smallest cached block of at least `bytes` bytes, or null.
std::byte* take_cached(std::size_t bytes) {
  std::byte* best = nullptr;
  for (auto& slot : cached_blocks) {
    std::byte* block = slot.exchange(nullptr, std::memory_order_acq_rel);
    if (block == nullptr) continue;
    const bool fits = stored_bytes(block) >= bytes;
    const bool better = fits && (best == nullptr || stored_bytes(block) < stored_bytes(best));
    std::byte* loser = better ? best : block;
    if (better) best = block;
    if (loser != nullptr) give_back(loser, stored_bytes(loser));
  }
  return best;
}

// Frees every cached block that no call has taken.
void drop_cached() {
  for (auto& slot : cached_blocks) std::free(slot.exchange(nullptr, std::memory_order_acq_rel));
}

}  // namespace

std::byte* thread_scratch(std::size_t bytes) {
  ThreadBuffer& buffer = thread_buffer;
  if (buffer.bytes < bytes || buffer.data == nullptr) {
    buffer.release();
    buffer.data = allocate(bytes);
    buffer.bytes = bytes;
  }
  return buffer.data;
}

std::size_t thread_scratch_bytes() { return thread_buffer.bytes; }

void trim_thread_scratch() {
  if (thread_buffer.bytes > kKeptThreadBytes) thread_buffer.release();
}

Workspace::Workspace(std::size_t bytes) : data_(take_cached(bytes)), bytes_(bytes) {
  if (data_ != nullptr) {
    bytes_ = stored_bytes(data_);
  } else {
    // What is cached is too small for this call, and this call's block will serve the smaller ones.
    drop_cached();
    data_ = allocate(bytes_);
  }
}

Workspace::~Workspace() { give_back(data_, bytes_); }

}  // namespace flashattn::cpu
