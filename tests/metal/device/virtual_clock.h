// The simulated GPU's clock: how long a dispatch would take by what it was counted to do. It turns
// with work alone, so that a program that times kernels finds the same times on every run. A rough
// model, with the rates of tests/metal/cost_model/model.py for what the simulator counts; address
// and other scalar arithmetic are not in it.
#pragma once

#include <array>
#include <cstdint>

#include "../runtime/device_api.h"

namespace simulated {

// Seconds that a GPU of eight cores would need for what the dispatch did.
double modelled_seconds(const metal_sim::Counters& counters,
                        const std::array<std::uint32_t, 3>& threads_per_threadgroup);

}  // namespace simulated
