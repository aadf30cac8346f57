// The pool behind parallel_for. A loop is a Job on its caller's stack, linked into a list that
// helpers look through. A helper registers with the job under the lock; the caller unlinks the job
// when the indices run out, and then waits for registered helpers alone.
#include "cpu/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>

#include "cpu/cpu_count.h"
#include "cpu/interruption.h"
#include "cpu/scratch.h"
#include "flashattn/error.h"

namespace flashattn::cpu {
namespace {

// About 10 us: longer than the gap between the phases of one call, shorter than anyone notices on a
// shared core.
constexpr int kSpins = 300;

constexpr std::chrono::milliseconds kAskInterval{50};

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Rounding and denormal mode of the calling thread. Helpers compute under the caller's mode:
// otherwise a result would depend on which thread computed it.
#if defined(__x86_64__)
using FloatMode = unsigned;
FloatMode float_mode() { return __builtin_ia32_stmxcsr(); }
void set_float_mode(FloatMode mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
using FloatMode = std::uint64_t;
FloatMode float_mode() {
  FloatMode mode = 0;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void set_float_mode(FloatMode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
using FloatMode = int;
FloatMode float_mode() { return 0; }
void set_float_mode(FloatMode) {}
#endif

// Whether this thread is inside a loop body: a nested loop then runs inline.
thread_local bool inside_loop = false;

// The count that was set or found, 0 before anyone asked.
std::atomic<int> requested_threads{0};

int default_num_threads() {
  const char* text = std::getenv("FLASHATTN_NUM_THREADS");
  if (text == nullptr || *text == '\0') return usable_cores();
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != '\0' || value < 1 || value > kMaxThreads) {
    throw InvalidArgument("flashattn: FLASHATTN_NUM_THREADS (" + std::string(text) +
                          ") must be a whole number from 1 to " + std::to_string(kMaxThreads));
  }
  return static_cast<int>(value);
}

}  // namespace

int get_num_threads() {
  int threads = requested_threads.load(std::memory_order_relaxed);
  if (threads == 0) {
    const int found = default_num_threads();
    // Another thread may have set a count meanwhile; that one holds.
    if (requested_threads.compare_exchange_strong(threads, found, std::memory_order_relaxed))
      threads = found;
  }
  return threads;
}

void set_num_threads(int threads) {
  if (threads < 1 || threads > kMaxThreads) {
    throw InvalidArgument("set_num_threads: threads (" + std::to_string(threads) +
                          ") must be a whole number from 1 to " + std::to_string(kMaxThreads));
  }
  requested_threads.store(threads, std::memory_order_relaxed);
  ThreadPool::global().set_threads(threads);
}

struct ThreadPool::Job {
  Task task = nullptr;
  void* context = nullptr;
  std::int64_t count = 0;
  FloatMode mode{};
  std::atomic<std::int64_t> next{0};  // first index that nobody has claimed
  std::atomic<int> working{0};        // helpers inside work()
  std::atomic<bool> failed{false};
  std::exception_ptr failure;  // written by the body that set `failed`

  // Guarded by the pool's mutex.
  int places = 0;  // helpers that may still join
  Job* next_open = nullptr;
};

std::atomic<ThreadPool*> ThreadPool::global_{nullptr};
ThreadPool* ThreadPool::abandoned_ = nullptr;

// At library load: a fork in the middle of a function-local initialisation would leave its guard
// locked.
const bool ThreadPool::fork_handler_installed_ =
    pthread_atfork(nullptr, nullptr, &drop_after_fork) == 0;

ThreadPool& ThreadPool::global() {
  ThreadPool* pool = global_.load(std::memory_order_acquire);
  if (pool != nullptr) return *pool;
  // Never destroyed: a destructor at process exit would wait for helpers that a library unload has
  // already ended.
  auto fresh = std::make_unique<ThreadPool>(get_num_threads());
  fresh->parent_process_pool_ = abandoned_;
  if (global_.compare_exchange_strong(pool, fresh.get(), std::memory_order_acq_rel))
    return *fresh.release();
  return *pool;
}

void ThreadPool::drop_after_fork() {
  ThreadPool* pool = global_.exchange(nullptr, std::memory_order_relaxed);
  if (pool != nullptr) abandoned_ = pool;
}

ThreadPool::ThreadPool(int threads) : threads_(threads) {}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void ThreadPool::set_threads(int threads) { threads_.store(threads, std::memory_order_relaxed); }

void ThreadPool::run(std::int64_t count, Task task, void* context) {
  if (count <= 0) return;
  if (inside_loop) {
    for (std::int64_t index = 0; index < count; ++index) task(context, index);
    return;
  }
  Job job;
  job.task = task;
  job.context = context;
  job.count = count;
  const int helpers = static_cast<int>(std::min<std::int64_t>(threads(), count)) - 1;
  if (helpers > 0) open(job, helpers);
  work(job);
  if (helpers > 0) close(job);
  trim_thread_scratch();
  if (job.failure) std::rethrow_exception(job.failure);
}

void ThreadPool::open(Job& job, int helpers) {
  job.mode = float_mode();
  job.places = helpers;
  bool all = false;
  {
    const std::lock_guard lock(mutex_);
    start_helpers(helpers);
    all = static_cast<std::size_t>(helpers) >= helpers_.size();
    Job** end = &open_jobs_;
    while (*end != nullptr) end = &(*end)->next_open;
    *end = &job;
    generation_.fetch_add(1, std::memory_order_release);
  }
  if (all) {
    wake_.notify_all();
  } else {
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
  }
}

void ThreadPool::close(Job& job) {
  {
    const std::lock_guard lock(mutex_);
    Job** link = &open_jobs_;
    while (*link != &job) link = &(*link)->next_open;
    *link = job.next_open;
  }
  for (int i = 0; i < kSpins && job.working.load(std::memory_order_acquire) != 0; ++i) pause_core();
  if (job.working.load(std::memory_order_acquire) == 0) return;
  const auto done = [&] { return job.working.load(std::memory_order_acquire) == 0; };
  Interruption* const interruption = Interruption::of_this_thread();
  std::unique_lock lock(mutex_);
  if (interruption == nullptr) return done_.wait(lock, done);
  // The caller alone can ask whether the call is to end; helpers hear of it between their blocks.
  while (!done_.wait_until(lock, std::chrono::system_clock::now() + kAskInterval, done)) {
    lock.unlock();
    interruption->requested();
    lock.lock();
  }
}

// Called under the lock. A system that refuses a thread, or the memory for one, leaves the pool
// with the helpers it has.
void ThreadPool::start_helpers(int wanted) {
  if (helpers_.size() >= static_cast<std::size_t>(wanted)) return;
  // Signals are for the program's own threads.
  sigset_t all_signals;
  sigset_t previous;
  sigfillset(&all_signals);
  pthread_sigmask(SIG_SETMASK, &all_signals, &previous);
  try {
    while (helpers_.size() < static_cast<std::size_t>(wanted)) {
      helpers_.emplace_back([this] { helper_loop(); });
    }
  } catch (const std::exception&) {
  }
  pthread_sigmask(SIG_SETMASK, &previous, nullptr);
}

void ThreadPool::helper_loop() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (help(lock)) continue;
    const std::uint32_t seen = generation_.load(std::memory_order_relaxed);
    const auto news = [&] { return generation_.load(std::memory_order_acquire) != seen; };
    lock.unlock();
    for (int i = 0; i < kSpins && !news(); ++i) pause_core();
    lock.lock();
    wake_.wait(lock, [&] { return stopping_ || news(); });
  }
}

// Works on the oldest open job that has a free place and unclaimed indices. False if there is none.
bool ThreadPool::help(std::unique_lock<std::mutex>& lock) {
  Job* job = open_jobs_;
  const auto wants_help = [](const Job& candidate) {
    return candidate.places > 0 && candidate.next.load(std::memory_order_relaxed) < candidate.count;
  };
  while (job != nullptr && !wants_help(*job)) job = job->next_open;
  if (job == nullptr) return false;
  --job->places;
  job->working.fetch_add(1, std::memory_order_relaxed);
  lock.unlock();
  set_float_mode(job->mode);
  work(*job);
  trim_thread_scratch();
  const bool last = job->working.fetch_sub(1, std::memory_order_acq_rel) == 1;
  // The caller may have returned by now: the job is gone.
  lock.lock();
  if (last) done_.notify_all();
  return true;
}

void ThreadPool::work(Job& job) {
  inside_loop = true;
  for (;;) {
    const std::int64_t index = job.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= job.count) break;
    try {
      job.task(job.context, index);
    } catch (...) {
      if (!job.failed.exchange(true, std::memory_order_relaxed))
        job.failure = std::current_exception();
      job.next.store(job.count, std::memory_order_relaxed);
    }
  }
  inside_loop = false;
}

}  // namespace flashattn::cpu
