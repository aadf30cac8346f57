// CpuKernels: everything that one instruction set exports. kernels.cpp defines one such table per
// instruction set, as flashattn::cpu::isa_<name>::kKernels; dispatch.cpp chooses among them.
#pragma once

#include "cpu/backward_table.h"
#include "cpu/decode_table.h"
#include "cpu/forward_table.h"
#include "cpu/peak_table.h"

namespace flashattn::cpu {

struct CpuKernels {
  ForwardKernels forward;
  BackwardKernels backward;
  DecodeKernels decode;
  PeakKernels peak;
};

}  // namespace flashattn::cpu
