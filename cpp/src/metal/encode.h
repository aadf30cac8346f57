// From a Schedule to the GPU: pipelines, bindings, command buffers, and waiting for them.
#pragma once

#include <array>
#include <cstddef>

#include "metal/call_buffers.h"
#include "metal/device.h"
#include "metal/pipeline_cache.h"
#include "metal/schedule.h"

namespace flashattn::metal {

// What stands behind each buffer slot of a call; a null buffer is a slot that the call does not
// use.
using SlotTable = std::array<BoundBuffer, abi::kBufferCount>;

// Runs every dispatch and returns when the GPU is done. Throws DeviceError with the driver's text
// and the kernels of the command buffer that failed; by then the GPU is done with every command
// buffer of the call.
void run_schedule(const Device& device, PipelineCache& pipelines, const Schedule& schedule,
                  const SlotTable& slots);

// How long the GPU has worked for this process by its own clock, in seconds.
double gpu_seconds();

}  // namespace flashattn::metal
