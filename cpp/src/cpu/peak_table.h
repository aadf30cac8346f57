// The loops by which one instruction set shows what the processor can do at most: the yardsticks of
// the benchmarks. peak.h implements them per instruction set, peak.cpp times them.
#pragma once

#include <cstdint>

namespace flashattn::cpu {

struct PeakKernels {
  // `rounds` rounds of independent float32 multiply-adds in registers; the result keeps them alive.
  float (*multiply_add)(std::int64_t rounds) = nullptr;
  std::int64_t multiply_add_flops = 0;  // of a round
  // The same with bf16 pair dot products; null where there is no such instruction.
  float (*bf16_dot)(std::int64_t rounds) = nullptr;
  std::int64_t bf16_dot_flops = 0;
  // Reads `bytes` bytes (a multiple of 4096) once, in order.
  float (*read)(const void* data, std::int64_t bytes) = nullptr;
};

}  // namespace flashattn::cpu
