// Ending a call that takes long: a program says how it is to be asked, and the CPU backend asks.
#pragma once

namespace flashattn {

// Asked on the thread that called, some twenty times a second; true makes the call throw
// Interrupted (error.h). What it would have written is then partly written.
using InterruptCheck = bool (*)();

// The check of every call that this thread makes while the object lives. It nests.
class InterruptScope {
 public:
  explicit InterruptScope(InterruptCheck check);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  InterruptCheck outer_;
};

// This thread's check, or null.
InterruptCheck interrupt_check();

}  // namespace flashattn
