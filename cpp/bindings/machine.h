// What Python may ask and set about backends, threads and this machine.
#pragma once

#include <nanobind/nanobind.h>

namespace flashattn::python {

void bind_machine(nanobind::module_& module);

}  // namespace flashattn::python
