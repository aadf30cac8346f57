// See computing.h.
#include "computing.h"

#include <optional>

namespace flashattn::python {

namespace nb = nanobind;

namespace {

unsigned long main_thread = 0;

// What a signal handler raised. Kept here and not in the interpreter, because the call's own
// clean-up may run Python before it is raised again. Only the main thread uses it.
std::optional<nb::python_error>& raised() {
  // Never destroyed: a Python object must not be let go of behind the interpreter's end.
  static auto* const error = new std::optional<nb::python_error>;
  return *error;
}

bool handler_raises() {
  const nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() == 0) return false;
  raised().emplace();
  return true;
}

InterruptCheck check_of_this_thread() {
  return PyThread_get_thread_ident() == main_thread ? &handler_raises : nullptr;
}

}  // namespace

Computing::Computing() : scope_(check_of_this_thread()) {}

void raise_interrupt() {
  if (!raised()) return PyErr_SetNone(PyExc_KeyboardInterrupt);
  raised()->restore();
  raised().reset();
}

void bind_computing() {
  main_thread = nb::cast<unsigned long>(
      nb::module_::import_("threading").attr("main_thread")().attr("ident"));
}

}  // namespace flashattn::python
