// The table of runtime functions handed to every kernel module.
#pragma once

#include "kernel_abi.h"

namespace metal_sim {
const abi::Runtime& runtime_table();
}  // namespace metal_sim
