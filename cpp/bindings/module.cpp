// The Python module flashattn._core: errors mapped to Python's, and each part bound by its own
// file. It is private: the public names, their documentation and their defaults are in
// python/flashattn.
#include <nanobind/nanobind.h>

#include <cstdlib>
#include <exception>
#include <new>

#include "buffer.h"
#include "calls.h"
#include "computing.h"
#include "flashattn/error.h"
#include "jax_ffi.h"
#include "machine.h"
#include "merge.h"
#ifdef FLASHATTN_WITH_METAL
#include "metal_memory.h"
#include "metal_stream.h"
#include "metal_tuning.h"
#endif
#include "ndarray.h"

namespace nb = nanobind;

namespace {

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const flashattn::InvalidArgument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const flashattn::InvalidType& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const flashattn::Unsupported& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what());
  } catch (const flashattn::DeviceError& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_SetString(PyExc_MemoryError, "flashattn: a call needs more memory than there is");
  } catch (const flashattn::Interrupted&) {
    flashattn::python::raise_interrupt();
  }
}

}  // namespace

NB_MODULE(_core, module) {
  module.doc() = "The compiled half of flashattn. Private: use the functions of the package.";
  // Programs that end with modules still referenced (test runners, notebooks) would print a report
  // that names no fault of theirs. The test of a clean exit asks for it.
  nb::set_leak_warnings(std::getenv("FLASHATTN_LEAK_WARNINGS") != nullptr);
  nb::register_exception_translator(&translate);
  flashattn::python::bind_buffer(module);
  flashattn::python::bind_computing();
  flashattn::python::bind_arrays(module);
  flashattn::python::bind_calls(module);
  flashattn::python::bind_jax_ffi(module);
  flashattn::python::bind_merge(module);
  flashattn::python::bind_machine(module);
#ifdef FLASHATTN_WITH_METAL
  flashattn::python::bind_metal_memory(module);
  flashattn::python::bind_metal_stream(module);
  flashattn::python::bind_metal_tuning(module);
#endif
}
