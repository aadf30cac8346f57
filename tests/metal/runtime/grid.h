// From a validated request to a finished grid.
#pragma once

#include <cstddef>
#include <vector>

#include "device_api.h"
#include "dispatch_state.h"

namespace metal_sim {

// Throws RequestError for what Metal's validation layer would refuse.
void check_request(const Kernel& kernel, const DispatchRequest& request);

// Runs all threadgroups of the grid on the calling thread, until done or state.stop.
void run_grid(DispatchState& state);

// Bytes of the threadgroup arrays a kernel declares, found by running one thread up to the last
// declaration on dummy buffers: a kernel must declare them before it does anything else.
std::size_t measure_threadgroup_bytes(const abi::KernelSpec& spec,
                                      const std::vector<ConstantValue>& constants);

}  // namespace metal_sim
