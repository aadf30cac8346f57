// Streams of the Metal backend, and the arrays that their pending calls use. Only in builds with
// that backend.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>

#include "ndarray.h"

namespace flashattn::python {

// To be told of every call that has just returned, with the GIL held: keeps its arrays until the
// GPU is done with them, if this thread's stream left the call pending.
void keep_while_pending(std::initializer_list<const ArrayArgument*> inputs,
                        std::initializer_list<const ArrayArgument*> others);

void bind_metal_stream(nanobind::module_& module);

}  // namespace flashattn::python
