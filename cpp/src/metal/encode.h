// From a Schedule to the GPU: bindings, command buffers, and waiting for them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "metal/call_buffers.h"
#include "metal/device.h"
#include "metal/pipeline_cache.h"
#include "metal/schedule.h"

namespace flashattn::metal {

// What stands behind each buffer slot of a call; a null buffer is a slot that the call does not
// use.
using SlotTable = std::array<BoundBuffer, abi::kBufferCount>;

// Command buffers that the process may have given the GPU without their being done. Whoever wants
// to commit one more waits until one is.
inline constexpr int kMostInFlight = 8;

// Work that is done one after the other although nobody waits in between. The order of command
// buffers alone does not see to it: Metal lets them overlap, and tells from the buffers that they
// use which must not, but memory that two calls adopt is two buffers.
struct WorkOrder {
  MTL::Event* event = nullptr;  // null: the caller waits for each piece of work
  std::uint64_t done = 0;       // the event's value once the last piece is done
  std::uint64_t waited = 0;     // `done` of the last piece that the host has waited for
};

// The dispatches of a schedule with what each needs.
struct EncodableWork {
  const Schedule& schedule;
  const std::vector<const CompiledKernel*>& kernels;  // one of each dispatch
  const SlotTable& slots;
  WorkOrder* order = nullptr;
};

// The command buffers of one call. However the call ends, it waits for those that the GPU was
// given: the call's buffers are freed next.
class Submission {
 public:
  Submission() = default;
  ~Submission() { end(); }
  Submission(const Submission&) = delete;
  Submission& operator=(const Submission&) = delete;

  // Encodes and commits every dispatch. Throws DeviceError when the device gives no command buffer;
  // by then it is done with the others.
  void commit(const Device& device, const EncodableWork& work);

  // Returns when the GPU is done: the driver's text and the kernels of the first command buffer
  // that failed, or "". `schedule` is what was committed.
  std::string wait(const Schedule& schedule);

  // wait() for who does not want to know.
  void end();

  // Whether wait() would return at once.
  bool is_done() const;

 private:
  struct Committed {
    NS::SharedPtr<MTL::CommandBuffer> commands;
    std::size_t first;  // dispatches [first, last)
    std::size_t last;
  };

  std::vector<Committed> committed_;
};

// How long the GPU has worked for this process by its own clock, in seconds.
double gpu_seconds();

}  // namespace flashattn::metal
