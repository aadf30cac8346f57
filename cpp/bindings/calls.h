// The attention calls as Python sees them, and the options they share.
#pragma once

#include <nanobind/nanobind.h>

namespace flashattn::python {

void bind_calls(nanobind::module_& module);

}  // namespace flashattn::python
