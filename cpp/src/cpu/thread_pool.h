// ThreadPool: a few sleeping helper threads that the calling thread may be joined by, for one loop
// at a time. The caller starts at once and waits only for helpers that have joined its loop, so a
// busy core costs nothing. No OpenMP: libgomp would share torch's settings, its spinning workers
// and its fork problems. It relies on cpu_count.h for the default number of threads. It does not
// order or weigh the indices: they are claimed in ascending order, so put the longest task first,
// and a second phase is a second parallel_for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace flashattn::cpu {

// Threads of a parallel loop, the caller included. The start value is FLASHATTN_NUM_THREADS, else
// the number of cores this process may use. Both throw InvalidArgument for a count
// outside 1..kMaxThreads.
inline constexpr int kMaxThreads = 1024;
int get_num_threads();
void set_num_threads(int threads);

class ThreadPool {
 public:
  // The process's pool. A forked child gets a new one: the parent's helpers do not exist there.
  static ThreadPool& global();

  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Threads that may work on one loop, the caller included.
  int threads() const { return threads_.load(std::memory_order_relaxed); }
  // Holds for loops that start later. Helpers are started when first needed and kept until the end.
  void set_threads(int threads);

  // Calls body(index) once for every index in [0, count), on any thread and, per thread, in
  // ascending order. Returns when all are done. The first exception of a body stops the claiming of
  // further indices and is rethrown here. Any number of threads may call at once; a call from
  // inside a body runs inline.
  template <class Body>
  void parallel_for(std::int64_t count, Body&& body) {
    using Callable = std::remove_reference_t<Body>;
    run(
        count, [](void* context, std::int64_t index) { (*static_cast<Callable*>(context))(index); },
        const_cast<void*>(static_cast<const void*>(std::addressof(body))));
  }

 private:
  using Task = void (*)(void* context, std::int64_t index);
  struct Job;

  void run(std::int64_t count, Task task, void* context);
  void open(Job& job, int helpers);
  void close(Job& job);
  void start_helpers(int wanted);
  void helper_loop();
  bool help(std::unique_lock<std::mutex>& lock);
  static void work(Job& job);
  static void drop_after_fork();

  std::mutex mutex_;  // guards open_jobs_, helpers_, stopping_ and every job's list fields
  std::condition_variable wake_;
  std::condition_variable done_;
  std::atomic<std::uint32_t> generation_{0};  // counts opened jobs: what an idle helper spins on
  std::atomic<int> threads_;
  Job* open_jobs_ = nullptr;
  std::vector<std::thread> helpers_;
  bool stopping_ = false;
  ThreadPool* parent_process_pool_ =
      nullptr;  // keeps what a fork abandoned reachable for leak checkers

  static std::atomic<ThreadPool*> global_;
  static ThreadPool* abandoned_;
  static const bool fork_handler_installed_;
};

}  // namespace flashattn::cpu
