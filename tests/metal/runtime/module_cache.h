// From MSL text to the path of a compiled module: a cache on disk, filled by
// tests/metal/translate/build_kernel.py. Several processes and threads may ask for the same module
// at once; one builds it, the others wait.
#pragma once

#include <string>
#include <string_view>

#include "device_api.h"
#include "settings.h"

namespace metal_sim {

// Path of the shared object. Throws CompileError.
std::string compiled_module(std::string_view source, const CompileOptions& options,
                            const Settings& settings);

}  // namespace metal_sim
