// What the schedule needs to know about a GPU. Filled in by device.cpp from the real device, or by
// a test. The number of cores is not among it: Metal does not tell, and results must not depend on
// it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "flashattn/tensor.h"

namespace flashattn::metal {

// Where a lane's two elements of an 8x8 matrix stand, as probed; shaders/lane_map.h.
enum class LaneMap : std::uint8_t {
  kUnknown,  // not probed, or not one that register kernels can use: staged kernels
  kAny,      // one map for float and for the factors of the storage type
  kApple,    // the one that Apple's GPUs have been seen with
};

class TuningTable;

struct DeviceFacts {
  std::string name;
  int apple_family = 0;                         // 7 is M1; simdgroup matrices need 7
  std::int64_t max_threadgroup_memory = 32768;  // bytes
  int max_threads_per_threadgroup = 1024;
  std::int64_t max_buffer_length = 0;           // bytes
  LaneMap float_map = LaneMap::kUnknown;        // of kernels with float factors: float32, bfloat16
  LaneMap half_map = LaneMap::kUnknown;         // of kernels with half factors: float16
  std::shared_ptr<const TuningTable> tuning{};  // null: the shipped choices
  // Work a command buffer may carry. The system ends one that runs for several seconds; this much
  // takes the slowest supported GPU (about 2 TFLOP/s at best) around one.
  double max_flops_per_command_buffer = 1e12;

  // Of the factors that tensors of `dtype` are multiplied as.
  LaneMap map_of(DType dtype) const { return dtype == DType::kFloat16 ? half_map : float_map; }
};

}  // namespace flashattn::metal
