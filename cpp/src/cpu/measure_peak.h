// What this machine can do at most, measured with the loops of the active instruction set (peak.h):
// the yardsticks by which the benchmarks judge the kernels. Figures are of this moment: on a
// machine that others use, measure next to what is judged.
#pragma once

#include <cstddef>

namespace flashattn::cpu {

// float32 multiply-adds, in floating-point operations per second of one thread's processor time.
// Best of several runs.
double measure_multiply_add_peak();

// The same for bf16 pair dot products; 0 where the instruction set has none.
double measure_bf16_dot_peak();

struct ReadBandwidth {
  double per_second = 0.0;  // bytes per second of wall time, all threads of the pool together
  double per_cpu_second =
      0.0;  // bytes per second of processor time of the thread that called, alone
};

// Reads a buffer of `bytes` bytes, which should be several times the last-level cache. Best of
// several runs.
ReadBandwidth measure_read_bandwidth(std::size_t bytes);

}  // namespace flashattn::cpu
