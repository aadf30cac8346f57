// Working memory that outlives a call, so that a small problem pays for no page faults.
// thread_scratch: one buffer per thread, for the body of a parallel loop. Workspace: one buffer per
// call, shared by its threads. Both are 4096-aligned and hold garbage. Buffers that are larger than
// the limits below are not kept.
#pragma once

#include <cstddef>

namespace flashattn::cpu {

inline constexpr std::size_t kScratchAlignment = 4096;
inline constexpr std::size_t kKeptThreadBytes = std::size_t{64} << 20;
inline constexpr std::size_t kKeptWorkspaceBytes = std::size_t{32} << 20;
inline constexpr int kKeptWorkspaces = 4;

// At least `bytes` bytes, valid until this thread's next call or until the loop body returns.
std::byte* thread_scratch(std::size_t bytes);

// Bytes of this thread's buffer, 0 without one.
std::size_t thread_scratch_bytes();

// Frees this thread's buffer if it is larger than kKeptThreadBytes. The thread pool calls it after
// every loop.
void trim_thread_scratch();

// A buffer of one call. Blocks are taken from and given back to a cache of kKeptWorkspaces blocks.
class Workspace {
 public:
  explicit Workspace(std::size_t bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }  // at least what was asked for

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace flashattn::cpu
