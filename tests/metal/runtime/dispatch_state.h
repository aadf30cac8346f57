// What all threadgroups of one dispatch share.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "device_api.h"
#include "kernel_abi.h"
#include "matrix_map.h"
#include "report.h"
#include "settings.h"

namespace metal_sim {

class DeviceRegions;
class LineTable;

struct DispatchState {
  const abi::KernelSpec* kernel = nullptr;
  std::array<void*, abi::kMaxBuffers> buffers{};
  std::vector<std::size_t> threadgroup_lengths;
  std::array<std::uint32_t, 3> threadgroups{1, 1, 1};
  std::array<std::uint32_t, 3> threads_per_threadgroup{1, 1, 1};
  std::array<std::uint32_t, 3> threads_per_grid{1, 1, 1};
  std::vector<ConstantValue> constants;
  Settings settings;
  MatrixMap map{};
  ReportSink reports;
  Counters counters;
  bool stop = false;                 // set after a defect that makes the rest meaningless
  DeviceRegions* regions = nullptr;  // checked modules only
  LineTable* lines = nullptr;        // checked modules only
};

}  // namespace metal_sim
