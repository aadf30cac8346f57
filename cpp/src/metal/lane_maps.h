// How the GPU's lanes hold 8x8 matrices: asked of the GPU once per process and type, by a kernel of
// one threadgroup. Register kernels depend on it and check it again; one that finds another map
// says so, and a weaker choice is made from then on.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>

#include "flashattn/tensor.h"
#include "metal/buffer_pool.h"
#include "metal/device.h"
#include "metal/pipeline_cache.h"

namespace flashattn::metal {

// Element i of a simdgroup: word 2 lane + e is 8 row + column of element e of a lane.
using LanePositions = std::array<std::uint32_t, 64>;

// What register kernels can make of a map; `floats` is the map of float's matrices, which half's
// have to share.
LaneMap classify(const LanePositions& positions, const LanePositions& floats);

// Which answer of the GPU is in force: a number above 0 that forget_lane_maps() changes.
int lane_map_generation();

// Makes every LaneMaps ask its GPU again: for tests, whose simulated GPU changes its map.
void forget_lane_maps();

class LaneMaps {
 public:
  LaneMaps(const Device* device, PipelineCache* pipelines, BufferPool* pool)
      : device_(device), pipelines_(pipelines), pool_(pool) {}

  // The facts with what is known of the maps, as far as FLASHATTN_METAL_KERNELS lets kernels use
  // it: "register" (the default) for those of the device's own map, "any" for those that take every
  // map, "staged" for those that take none. Throws InvalidArgument for another value. `reused`:
  // older facts, whose memory the new ones take.
  DeviceFacts facts(DeviceFacts reused = {});

  // After a kernel for tensors of `dtype` could not do with the map `chosen`, for the reason given:
  // the next weaker choice, which describe() tells.
  void demote(DType dtype, LaneMap chosen, const std::string& reason);

  // Which kernels calls run, and why, in words.
  std::string describe();

 private:
  LanePositions probe(DType dtype) const;
  void ask();

  const Device* device_;
  PipelineCache* pipelines_;
  BufferPool* pool_;
  std::mutex mutex_;
  int asked_ = 0;  // the generation of forget_lane_maps that the two maps are of
  LaneMap float_ = LaneMap::kUnknown;
  LaneMap half_ = LaneMap::kUnknown;
  std::string demoted_;  // why, the first time
};

}  // namespace flashattn::metal
