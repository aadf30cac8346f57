// The check of each thread; see flashattn/interrupt.h.
#include "flashattn/interrupt.h"

namespace flashattn {

namespace {

thread_local InterruptCheck current = nullptr;

}  // namespace

InterruptScope::InterruptScope(InterruptCheck check) : outer_(current) { current = check; }

InterruptScope::~InterruptScope() { current = outer_; }

InterruptCheck interrupt_check() { return current; }

}  // namespace flashattn
