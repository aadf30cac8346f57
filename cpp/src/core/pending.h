// Work that a thread has given a device without waiting for it: who on the host is about to touch
// memory that it may still read or write has to wait first. Without such work, which is nearly
// always, each function here is one comparison.
#pragma once

#include "flashattn/tensor.h"

namespace flashattn {

class PendingWork {
 public:
  virtual ~PendingWork() = default;

  // Returns when all of it is done. Never throws: whoever owns the work tells of failures.
  virtual void settle() noexcept = 0;
  // Whether some of it writes the view's memory, or with `reads` too reads it.
  virtual bool touches(const TensorView& view, bool reads) const = 0;
};

// This thread's, or null.
PendingWork* pending_work();
void set_pending_work(PendingWork* work);

// Before the host reads or writes anything.
inline void settle_pending() {
  if (PendingWork* const work = pending_work()) work->settle();
}

// Before the host reads, or writes, the view's memory.
inline void settle_before_reading(const TensorView& view) {
  PendingWork* const work = pending_work();
  if (work != nullptr && work->touches(view, false)) work->settle();
}
inline void settle_before_writing(const TensorView& view) {
  PendingWork* const work = pending_work();
  if (work != nullptr && work->touches(view, true)) work->settle();
}

// While it lives, calls of this thread are done when they return: for callers that know of no
// pending work.
class WithoutPendingWork {
 public:
  WithoutPendingWork() : hidden_(pending_work()) {
    settle_pending();
    set_pending_work(nullptr);
  }
  ~WithoutPendingWork() { set_pending_work(hidden_); }
  WithoutPendingWork(const WithoutPendingWork&) = delete;
  WithoutPendingWork& operator=(const WithoutPendingWork&) = delete;

 private:
  PendingWork* hidden_;
};

}  // namespace flashattn
