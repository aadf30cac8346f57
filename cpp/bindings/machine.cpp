// Backends, copy statistics, threads and build facts, as plain Python values.
#include "machine.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "cpu/dispatch.h"
#include "cpu/measure_peak.h"
#include "cpu/thread_pool.h"
#include "flashattn/backend.h"
#ifdef FLASHATTN_SIMULATED_METAL
#include "metal/lane_maps.h"
#include "runtime/settings.h"
#endif

namespace flashattn::python {

namespace nb = nanobind;

namespace {

using BackendFacts = nb::typed<nb::tuple, nb::str, nb::str, bool, nb::str,
                               nb::typed<nb::tuple, nb::str, nb::ellipsis>, bool>;
using ByteCounts = nb::typed<nb::tuple, int, int>;

// [(name, device, available, reason, features, default)] in the order in which backends are asked.
nb::typed<nb::list, BackendFacts> describe_backends() {
  nb::typed<nb::list, BackendFacts> result;
  for (const Backend* backend : backends()) {
    const Support available = backend->available();
    nb::list features;
    for (const std::string& feature : backend->features()) features.append(feature);
    result.append(nb::make_tuple(backend->name(), backend->device(), available.ok, available.reason,
                                 nb::tuple(features), backend->chosen_by_default()));
  }
  return result;
}

// {name: (adopted_bytes, copied_bytes)}.
nb::typed<nb::dict, nb::str, ByteCounts> copy_stats(bool reset) {
  nb::typed<nb::dict, nb::str, ByteCounts> result;
  for (Backend* backend : backends()) {
    const CopyStats stats = backend->copy_stats(reset);
    result[backend->name().c_str()] = nb::make_tuple(stats.adopted_bytes, stats.copied_bytes);
  }
  return result;
}

// (bytes per second of all threads, bytes per processor second of one), reading `bytes` bytes.
nb::typed<nb::tuple, float, float> measure_read_bandwidth(std::size_t bytes) {
  const cpu::ReadBandwidth result = cpu::measure_read_bandwidth(bytes);
  return nb::make_tuple(result.per_second, result.per_cpu_second);
}

#ifdef __clang__
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "gcc " __VERSION__;
#endif

}  // namespace

void bind_machine(nb::module_& module) {
  module.attr("VERSION") = FLASHATTN_VERSION;
  module.attr("COMPILER") = kCompiler;
  module.def("backends", &describe_backends,
             "(name, device, available, reason, features, default) each.");
  module.def("copy_stats", &copy_stats, nb::arg("reset"), "{backend: (adopted, copied)} in bytes.");
  module.def("built_isas", &cpu::built_isas, "Instruction sets of this build, best first.");
  module.def("supported_isas", &cpu::supported_isas, "Those that run here, best first.");
  module.def("active_isa", &cpu::active_isa, "The one that calls use.");
  module.def("set_isa", &cpu::set_isa, nb::arg("name"),
             "Makes later calls use it; \"\" is the best.");
#ifdef FLASHATTN_SIMULATED_METAL
  module.def("set_simulated_metal", &metal_sim::set_setting, nb::arg("name"), nb::arg("value"),
             "Changes a setting of the simulated device: map, schedule, seed, check, ...");
  module.def("forget_lane_maps", &metal::forget_lane_maps,
             "Makes the Metal backend ask the simulated device for its lane map again.");
#endif
  module.def("measure_multiply_add_peak", &cpu::measure_multiply_add_peak,
             "float32 operations per processor second that one thread can do at most.");
  module.def("measure_bf16_dot_peak", &cpu::measure_bf16_dot_peak,
             "The same for bfloat16 pair products; 0 without that instruction.");
  module.def("measure_read_bandwidth", &measure_read_bandwidth, nb::arg("bytes"),
             "(bytes per second of all threads, bytes per processor second of one).");
  module.def("get_num_threads", &cpu::get_num_threads, "Threads of a parallel loop.");
  module.def("set_num_threads", &cpu::set_num_threads, nb::arg("threads"),
             "Sets the threads of later calls, the calling thread included.");
}

}  // namespace flashattn::python
