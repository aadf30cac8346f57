// The part of a call in which no Python runs: without the GIL, and ended by Ctrl-C.
#pragma once

#include <nanobind/nanobind.h>

#include "flashattn/interrupt.h"

namespace flashattn::python {

// To live around a computation. Python's main thread runs its signal handlers about twenty times a
// second meanwhile; what one raises ends the call (error.h: Interrupted). Of other threads Python
// lets no handler run.
class Computing {
 public:
  Computing();

 private:
  nanobind::gil_scoped_release release_;
  InterruptScope scope_;
};

// Raises what the handler that ended a call had raised; for Interrupted.
void raise_interrupt();

void bind_computing();

}  // namespace flashattn::python
