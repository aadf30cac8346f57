// The translation unit that is compiled once per instruction set (cmake/cpu_isa.cmake). It exports
// one table and nothing else: no inline function of the standard library and no weak symbol may
// appear in its object, because the linker could give that copy to code that runs on an older
// processor.

#include "cpu/backward.h"
#include "cpu/decode.h"
#include "cpu/forward.h"
#include "cpu/kernel_table.h"
#include "cpu/peak.h"

namespace flashattn::cpu::FLASHATTN_CPU_ISA {

extern const CpuKernels kKernels;
const CpuKernels kKernels = {.forward = kForwardKernels,
                             .backward = backward::kKernels,
                             .decode = kDecodeKernels,
                             .peak = kPeakKernels};

}  // namespace flashattn::cpu::FLASHATTN_CPU_ISA
