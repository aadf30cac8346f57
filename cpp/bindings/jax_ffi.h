// _core.jax_forward and _core.jax_backward: attention as handlers of XLA's foreign function
// interface, in the capsules that jax.ffi.register_ffi_target takes; and what JAX asks while it
// traces, _core.check_call.
#pragma once

#include <nanobind/nanobind.h>

namespace flashattn::python {

void bind_jax_ffi(nanobind::module_& module);

}  // namespace flashattn::python
