// _core.Buffer: aligned memory that numpy arrays are laid over.
#pragma once

#include <nanobind/nanobind.h>

namespace flashattn::python {

void bind_buffer(nanobind::module_& module);

}  // namespace flashattn::python
