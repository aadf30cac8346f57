// Session: everything that exists once there is a GPU. Lives as long as the process.
#pragma once

#include <cstddef>
#include <utility>

#include "metal/buffer_pool.h"
#include "metal/cache_files.h"
#include "metal/call.h"
#include "metal/device.h"
#include "metal/lane_maps.h"
#include "metal/pipeline_cache.h"
#include "metal/stored_tuning.h"

namespace flashattn::metal {

struct Session {
  static constexpr std::size_t kIdlePoolBytes = std::size_t{256} << 20;

  Session(NS::SharedPtr<MTL::Device> found, CopyCounters* counters)
      : device(std::move(found)),
        pipelines(device.handle(), archive_path(device.facts().name, device.os_build())),
        pool(device.handle(), kIdlePoolBytes),
        lane_maps(&device, &pipelines, &pool),
        tuning(cache_file("tuning", device.facts().name, device.os_build(), "txt")),
        calls({.device = device.handle(),
               .max_length = static_cast<std::uint64_t>(device.facts().max_buffer_length),
               .pool = &pool,
               .counters = counters}) {}

  // What calls are scheduled with. `reused`: older facts, whose memory the new ones take.
  DeviceFacts facts(DeviceFacts reused = {}) {
    DeviceFacts facts = lane_maps.facts(std::move(reused));
    facts.tuning = tuning.table();
    return facts;
  }

  Device device;
  PipelineCache pipelines;
  BufferPool pool;
  LaneMaps lane_maps;
  TuningStore tuning;
  CallPool calls;
};

}  // namespace flashattn::metal
