// _core.MetalMemory: memory for results on the GPU that the caller's arrays are on. Only in builds
// with the Metal backend.
#pragma once

#include <nanobind/nanobind.h>

namespace flashattn::python {

void bind_metal_memory(nanobind::module_& module);

}  // namespace flashattn::python
