// The device API for callers without C++ (tests/metal/simulator.py, and tests that steer the
// settings of the runtime inside the extension module). Handles are never freed: a test process
// holds a few hundred at most. A failing call returns null or a negative number; metal_sim_error()
// tells why, per thread.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define METAL_SIM_EXPORT extern "C" __attribute__((visibility("default")))

METAL_SIM_EXPORT const char* metal_sim_error();
METAL_SIM_EXPORT int metal_sim_set(const char* name, const char* value);

// `includes` and `macros` are null-terminated arrays; a macro is NAME or NAME=VALUE.
METAL_SIM_EXPORT void* metal_sim_compile(const char* source, const char* file_name,
                                         const char* const* includes, const char* const* macros);
// A compiled kernel module by its path.
METAL_SIM_EXPORT void* metal_sim_load(const char* module_path);
// Names separated by line ends, in a per-thread buffer.
METAL_SIM_EXPORT const char* metal_sim_function_names(void* library);
// Constants: `count` indices and 64-bit values (object representation in the low bytes).
METAL_SIM_EXPORT void* metal_sim_kernel(void* library, const char* name, int count,
                                        const uint32_t* indices, const uint64_t* values);
METAL_SIM_EXPORT size_t metal_sim_static_threadgroup_bytes(void* kernel);
METAL_SIM_EXPORT uint32_t metal_sim_max_threads(void* kernel);
// Sizes are three numbers each; threads_per_grid may be null. Returns the number of reports.
METAL_SIM_EXPORT int metal_sim_dispatch(void* kernel, const uint32_t* threadgroups,
                                        const uint32_t* threads_per_threadgroup,
                                        const uint32_t* threads_per_grid, int buffer_count,
                                        void* const* pointers, const size_t* lengths,
                                        int threadgroup_count, const size_t* threadgroup_lengths);
// Of this thread's last dispatch: one report; "name=value" lines of the counters.
METAL_SIM_EXPORT const char* metal_sim_report(int index);
METAL_SIM_EXPORT const char* metal_sim_counters();
