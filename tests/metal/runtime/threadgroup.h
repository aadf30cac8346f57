// Runs the threads of one threadgroup as fibers of the calling OS thread: barriers, exchanges
// between lanes, matrix multiplies, and the detection of threads that wait for each other in vain.
// One object is reused for many threadgroups and dispatches; it belongs to one OS thread at a time.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fiber.h"
#include "kernel_abi.h"
#include "ready_queue.h"
#include "threadgroup_memory.h"

namespace metal_sim {

struct DispatchState;
class AccessChecker;

enum class ThreadState : std::uint8_t {
  kReady,
  kAtThreadgroupBarrier,
  kAtSimdgroupOperation,
  kDone
};

// Where a thread waits. `operation` is a string literal.
struct WaitPoint {
  const char* operation = "";
  abi::Source source{nullptr, 0};
  bool same_place(const WaitPoint& other) const;
  std::string text() const;
};

struct Thread {
  Fiber fiber;
  ThreadState state = ThreadState::kDone;
  bool exists = false;  // false in the cut-off part of a partial threadgroup
  std::uint16_t index = 0;
  WaitPoint waiting;
  abi::ThreadPosition position{};
};

// Counts what orders memory. Two accesses by different threads are ordered when a counter differs.
struct Epochs {
  std::uint32_t threadgroup = 1;
  std::uint32_t device = 1;
};

struct Simdgroup {
  std::uint32_t live = 0;
  std::uint32_t arrived = 0;
  std::uint32_t parity = 0;  // two sets of slots: a lane may run ahead by one operation
  WaitPoint first;           // of the lanes that have arrived
  Epochs epochs;
  alignas(64) std::array<std::array<char, 32 * abi::kExchangeStride>, 2> slots;
  std::array<std::array<std::array<float, 64>, 3>, 2> matrices;  // a, b, c (then d) of a multiply
};

class Threadgroup {
 public:
  Threadgroup();
  ~Threadgroup();

  // Runs threadgroup number `index` of the dispatch to its end or to a defect that makes going on
  // impossible.
  void run(DispatchState& dispatch, std::uint32_t index);
  // Runs one thread up to the end of the declarations; returns the bytes declared.
  std::size_t measure(DispatchState& dispatch);

  // The threadgroup that runs on this OS thread, or nullptr.
  static Threadgroup* current();

  // What the kernel's fibers call (kernel_abi.h).
  void* declared_array(std::uint32_t site, std::size_t bytes, std::size_t alignment,
                       const char* name);
  void declarations_end();
  void barrier(abi::BarrierScope scope, int flags, abi::Source source);
  const void* exchange(const void* value, std::size_t bytes, const char* name, abi::Source source);
  void multiply(float* d, const float* a, const float* b, const float* c, abi::Source source);

  Thread& thread() { return *thread_; }
  Simdgroup& simdgroup() { return simdgroups_[thread_->index / 32u]; }
  DispatchState& dispatch() { return *dispatch_; }
  ThreadgroupMemory& memory() { return memory_; }
  AccessChecker& checker() { return *checker_; }
  std::uint32_t index() const { return index_; }
  const Epochs& epochs() const { return epochs_; }
  bool measuring() const { return measuring_; }
  std::uint32_t threads() const { return thread_count_; }
  const Thread& thread_at(std::uint32_t i) const { return *threads_[i]; }

  void report(const std::string& key, const std::string& text);
  // Abandons the threadgroup and the rest of the grid; does not return.
  [[noreturn]] void stop();

 private:
  static void fiber_entry();
  void prepare(std::uint32_t index);
  void place(Thread& thread, std::uint32_t index);
  void finish_thread();
  void switch_to_next(bool ends);
  void release_threadgroup();
  void release_simdgroup(std::uint32_t simdgroup);
  void threadgroup_barrier(int flags, const WaitPoint& point);
  void simdgroup_barrier(int flags, const WaitPoint& point);
  bool arrive(Simdgroup& group, const WaitPoint& point);
  void report_deadlock();

  DispatchState* dispatch_ = nullptr;
  std::uint32_t index_ = 0;
  bool measuring_ = false;
  bool stopped_ = false;
  std::uint32_t thread_count_ = 0;
  std::uint32_t live_ = 0;
  std::uint32_t arrived_ = 0;  // at the threadgroup barrier
  WaitPoint first_arrival_;
  Epochs epochs_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Simdgroup> simdgroups_;
  ReadyQueue ready_;
  ThreadgroupMemory memory_;
  std::unique_ptr<AccessChecker> checker_;
  std::array<void*, abi::kMaxBuffers> threadgroup_arguments_{};
  Fiber origin_;  // the OS thread
  Thread* thread_ = nullptr;
};

}  // namespace metal_sim
