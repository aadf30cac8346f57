// The thread's pending work; see pending.h.
#include "core/pending.h"

namespace flashattn {

namespace {

thread_local PendingWork* of_this_thread = nullptr;

}  // namespace

PendingWork* pending_work() { return of_this_thread; }

void set_pending_work(PendingWork* work) { of_this_thread = work; }

}  // namespace flashattn
