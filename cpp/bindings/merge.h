// _core.merge and _core.merge_backward.
#pragma once

#include <nanobind/nanobind.h>

namespace flashattn::python {

void bind_merge(nanobind::module_& module);

}  // namespace flashattn::python
