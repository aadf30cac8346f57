// Backends, copy statistics, threads and build facts, as plain Python values.
#include "machine.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>

#include "cpu/thread_pool.h"
#include "flashattn/backend.h"
#include "ndarray.h"

namespace flashattn::python {

namespace nb = nanobind;

namespace {

// [(name, device, available, reason, features)] in the order in which backends are asked.
nb::list describe_backends() {
  nb::list result;
  for (const Backend* backend : backends()) {
    const Support available = backend->available();
    nb::list features;
    for (const std::string& feature : backend->features()) features.append(feature);
    result.append(nb::make_tuple(backend->name(), backend->device(), available.ok, available.reason,
                                 nb::tuple(features)));
  }
  return result;
}

// {name: (adopted_bytes, copied_bytes)}. Copies made on the way in are the cpu backend's: nothing
// else takes host memory that it cannot read as it is.
nb::dict copy_stats(bool reset) {
  nb::dict result;
  for (Backend* backend : backends()) {
    CopyStats stats = backend->copy_stats(reset);
    const std::string name = backend->name();
    if (name == "cpu") stats.copied_bytes += copied_bytes(reset);
    result[name.c_str()] = nb::make_tuple(stats.adopted_bytes, stats.copied_bytes);
  }
  return result;
}

#ifdef __clang__
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "gcc " __VERSION__;
#endif

}  // namespace

void bind_machine(nb::module_& module) {
  module.attr("__version__") = FLASHATTN_VERSION;
  module.attr("COMPILER") = kCompiler;
  module.def("backends", &describe_backends, "(name, device, available, reason, features) each.");
  module.def("copy_stats", &copy_stats, nb::arg("reset"), "{backend: (adopted, copied)} in bytes.");
  module.def("get_num_threads", &cpu::get_num_threads, "Threads of a parallel loop.");
  module.def("set_num_threads", &cpu::set_num_threads, nb::arg("threads"),
             "Sets the threads of later calls, the calling thread included.");
}

}  // namespace flashattn::python
