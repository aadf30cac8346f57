// Planting a GPU fault or a shortage, so that tests can see what the host makes of one. Exported
// from the module for ctypes.
#pragma once

#include <string>

#include "objc/live_objects.h"

extern "C" {

// The next command buffer that runs fails with this text instead of running.
FLASHATTN_SIMULATED_EXPORT void flashattn_simulated_fail_next(const char* text);

// While it is not 0, newBufferWithBytesNoCopy refuses all memory, as it does memory that cannot be
// shared with the GPU.
FLASHATTN_SIMULATED_EXPORT void flashattn_simulated_refuse_adoption(int refuse);

// While it is not 0, newBufferWithLength gives nil, as it does when memory runs out.
FLASHATTN_SIMULATED_EXPORT void flashattn_simulated_refuse_allocation(int refuse);

// While it is not 0, commandBuffer gives nil.
FLASHATTN_SIMULATED_EXPORT void flashattn_simulated_refuse_command_buffers(int refuse);

// Until it is called with null, no pipeline is made of a kernel whose name has this text in it, as
// when the compiler's process dies on it.
FLASHATTN_SIMULATED_EXPORT void flashattn_simulated_refuse_pipelines(const char* text);

// While it is not 0, committed command buffers wait.
FLASHATTN_SIMULATED_EXPORT void flashattn_simulated_hold_work(int hold);

// While it is not 0, of the command buffers that wait the newest runs first, as far as Metal lets
// it: before others that use none of its buffers, and after the events that it waits for.
FLASHATTN_SIMULATED_EXPORT void flashattn_simulated_reorder_work(int reorder);

// The most command buffers that were ever committed and not done, since the last call of this.
FLASHATTN_SIMULATED_EXPORT int flashattn_simulated_most_in_flight(void);

}  // extern "C"

namespace simulated {

// The planted text, which is then gone; "" when none is planted.
std::string take_planted_fault();
bool refuses_adoption();
bool refuses_allocation();
bool refuses_command_buffers();
bool holds_work();
bool reorders_work();
void note_in_flight(int change);
bool refuses_pipeline(const std::string& kernel);

}  // namespace simulated
