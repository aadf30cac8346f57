// Which kernels run: the best instruction set that this build has and this processor and system can
// run. FLASHATTN_CPU_ISA forces one by name; it is read once, when the first kernel is asked for.
// Relies on one CpuKernels table per built instruction set (kernels.cpp).
#pragma once

#include <string>
#include <vector>

#include "cpu/kernel_table.h"

namespace flashattn::cpu {

// Names: x86-64-v4-bf16, x86-64-v4, x86-64-v3, x86-64-v2, neon. Best first.
std::vector<std::string> built_isas();
std::vector<std::string> supported_isas();

// The kernels to use now. The reference is to a constant and stays valid; a whole call uses one
// table. Throws InvalidArgument for a FLASHATTN_CPU_ISA that cannot be used.
const CpuKernels& active_kernels();
std::string active_isa();

// Makes later calls use the instruction set called `name`; empty is the best one. Throws
// InvalidArgument, naming the choices, for one that was not built or cannot run here.
void set_isa(const std::string& name);

}  // namespace flashattn::cpu
