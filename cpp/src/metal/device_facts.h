// What the schedule needs to know about a GPU. Filled in by device.cpp from the real device, or by
// a test. The number of cores is not among it: Metal does not tell, and results must not depend on
// it.
#pragma once

#include <cstdint>
#include <string>

namespace flashattn::metal {

struct DeviceFacts {
  std::string name;
  int apple_family = 0;                         // 7 is M1; simdgroup matrices need 7
  std::int64_t max_threadgroup_memory = 32768;  // bytes
  int max_threads_per_threadgroup = 1024;
  std::int64_t max_buffer_length = 0;  // bytes
  // Work a command buffer may carry. The system ends one that runs for several seconds; this much
  // takes the slowest supported GPU (about 2 TFLOP/s at best) around one.
  double max_flops_per_command_buffer = 1e12;
};

}  // namespace flashattn::metal
