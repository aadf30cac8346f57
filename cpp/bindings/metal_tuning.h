// The tuning table of the Metal backend: what `python -m flashattn tune` works with. Only in builds
// with that backend.
#pragma once

#include <nanobind/nanobind.h>

namespace flashattn::python {

void bind_metal_tuning(nanobind::module_& module);

}  // namespace flashattn::python
