// Whether a call is to end early, for all threads that work on it. The thread that called asks the
// program (flashattn/interrupt.h) every 50 ms, also while it waits for helpers; the others read a
// flag. Kernels and schedules ask between blocks of rows and leave the rest undone.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "cpu/job.h"
#include "flashattn/interrupt.h"
#include "flashattn/problem.h"

namespace flashattn::cpu {

class Interruption {
 public:
  // For the call that this thread makes. Nobody asks about a short one, or on a thread without a
  // check.
  explicit Interruption(const AttentionProblem& problem);
  ~Interruption();
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

  // For the job; empty where nobody asks.
  EndingCheck ending();
  // On any thread.
  bool requested();
  // Throws Interrupted if the program wanted the call to end.
  void rethrow() const;

  // The one of the call that this thread makes, or null: for the wait at a loop's end.
  static Interruption* of_this_thread();

 private:
  InterruptCheck check_ = nullptr;
  std::thread::id caller_;
  std::chrono::steady_clock::time_point next_;  // when the caller asks again
  std::atomic<bool> requested_{false};
  Interruption* outer_;
};

// Runs `work` on the job of a call. Throws Interrupted if the program wanted it to end.
template <class Work>
void run_interruptibly(const AttentionProblem& problem, AttentionJob& job, const Work& work) {
  Interruption interruption(problem);
  job.ending = interruption.ending();
  work();
  interruption.rethrow();
}

}  // namespace flashattn::cpu
