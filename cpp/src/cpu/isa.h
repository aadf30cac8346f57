// The namespace of the instruction set being compiled, and the attributes of code inside it.
//
// kernels.cpp is compiled once per instruction set with FLASHATTN_CPU_ISA_NAME = v2, v3, v4,
// v4_bf16 or neon (cmake/cpu_isa.cmake). Everything it includes lives in flashattn::cpu::isa_<name>
// and is either FLASHATTN_INLINE or static, so that no object of one instruction set defines a
// symbol that another could be linked against.
#pragma once

#include "core/visibility.h"  // FLASHATTN_INLINE

#ifndef FLASHATTN_CPU_ISA_NAME
#error "compile this with FLASHATTN_CPU_ISA_NAME defined: see cmake/cpu_isa.cmake"
#endif

#define FLASHATTN_PASTE_EXPANDED(a, b) a##b
#define FLASHATTN_PASTE(a, b) FLASHATTN_PASTE_EXPANDED(a, b)

// Used as: namespace flashattn::cpu::FLASHATTN_CPU_ISA { ... }
#define FLASHATTN_CPU_ISA FLASHATTN_PASTE(isa_, FLASHATTN_CPU_ISA_NAME)

// Loops over the registers of a tile must be unrolled whole, or the accumulators live in memory.
#if defined(__clang__)
#define FLASHATTN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define FLASHATTN_UNROLL _Pragma("GCC unroll 64")
#endif

#define FLASHATTN_NOINLINE static __attribute__((noinline))
