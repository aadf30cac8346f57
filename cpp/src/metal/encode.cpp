// Encoding dispatches and waiting; see encode.h.
#include "metal/encode.h"

#include <cassert>
#include <mutex>
#include <string>
#include <vector>

#include "flashattn/error.h"
#include "metal/objects.h"

namespace flashattn::metal {

namespace {

// A sum of doubles under a lock: libc++ has had atomic ones only since LLVM 18.
std::mutex seconds_mutex;
double seconds_of_gpu = 0;

void add_gpu_seconds(double seconds) {
  const std::lock_guard lock(seconds_mutex);
  seconds_of_gpu += seconds;
}

// A pipeline per dispatch, compiled before anything runs.
using Pipelines = std::vector<NS::SharedPtr<MTL::ComputePipelineState>>;

void bind_slots(MTL::ComputeCommandEncoder* encoder, const Dispatch& dispatch,
                const SlotTable& slots) {
  for (const Binding& binding : bindings(dispatch.key)) {
    const BoundBuffer& bound = slots[binding.slot];
    assert(bound.buffer != nullptr);
    encoder->setBuffer(bound.buffer, bound.offset, binding.slot);
  }
  encoder->setBytes(&dispatch.params, sizeof dispatch.params, abi::kBufferParams);
  if (takes_modifiers(dispatch.key)) {
    encoder->setBytes(&dispatch.modifiers, sizeof dispatch.modifiers, abi::kBufferModifiers);
  }
}

// Encodes the dispatches [first, last) into one command buffer and commits it.
MTL::CommandBuffer* commit_range(const Device& device, const Schedule& schedule,
                                 const Pipelines& pipelines, const SlotTable& slots,
                                 std::size_t first, std::size_t last) {
  // Made first: nothing may throw between opening an encoder and closing it.
  NS::String* label = to_ns("flashattn " + to_string(schedule.dispatches[first].key));
  MTL::CommandBuffer* commands = device.queue()->commandBuffer();
  MTL::ComputeCommandEncoder* encoder =
      commands == nullptr ? nullptr : commands->computeCommandEncoder();
  if (encoder == nullptr) throw DeviceError("metal: the device gives no command buffer");
  commands->setLabel(label);
  for (std::size_t i = first; i < last; ++i) {
    const Dispatch& dispatch = schedule.dispatches[i];
    encoder->setComputePipelineState(pipelines[i].get());
    bind_slots(encoder, dispatch, slots);
    encoder->dispatchThreadgroups(
        MTL::Size(dispatch.threadgroups, 1, 1),
        MTL::Size(static_cast<NS::UInteger>(dispatch.threads_per_threadgroup), 1, 1));
  }
  encoder->endEncoding();
  commands->commit();
  return commands;
}

struct Committed {
  MTL::CommandBuffer* commands;  // autoreleased by the caller's pool
  std::size_t first;             // dispatches [first, last)
  std::size_t last;
};

// What the GPU has been given. However a call ends, it waits for all of it: the call's buffers are
// freed next.
class InFlight {
 public:
  explicit InFlight(std::size_t most) { committed_.reserve(most); }
  ~InFlight() {
    for (const Committed& one : committed_) one.commands->waitUntilCompleted();
  }
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  void add(const Committed& one) { committed_.push_back(one); }
  const std::vector<Committed>& all() const { return committed_; }

 private:
  std::vector<Committed> committed_;
};

std::string failure_text(const Committed& failed, const Schedule& schedule) {
  std::string kernels;
  for (std::size_t i = failed.first; i < failed.last; ++i) {
    kernels += (kernels.empty() ? "" : ", ") + to_string(schedule.dispatches[i].key);
  }
  return "metal: a command buffer failed: " + describe(failed.commands->error()) +
         "\nits kernels: " + kernels;
}

}  // namespace

double gpu_seconds() {
  const std::lock_guard lock(seconds_mutex);
  return seconds_of_gpu;
}

void run_schedule(const Device& device, PipelineCache& cache, const Schedule& schedule,
                  const SlotTable& slots) {
  const AutoreleaseScope scope;
  Pipelines pipelines;
  for (const Dispatch& dispatch : schedule.dispatches) pipelines.push_back(cache.get(dispatch.key));

  InFlight in_flight(schedule.dispatches.size());
  std::string failure;
  for (std::size_t first = 0; first < schedule.dispatches.size() && failure.empty();) {
    std::size_t last = first + 1;
    const int number = schedule.dispatches[first].command_buffer;
    while (last < schedule.dispatches.size() && schedule.dispatches[last].command_buffer == number)
      ++last;
    try {
      in_flight.add({commit_range(device, schedule, pipelines, slots, first, last), first, last});
    } catch (const DeviceError& refused) {
      failure = refused.what();
    }
    first = last;
  }
  for (const Committed& one : in_flight.all()) {
    one.commands->waitUntilCompleted();
    add_gpu_seconds(one.commands->GPUEndTime() - one.commands->GPUStartTime());
    const bool completed = one.commands->status() == MTL::CommandBufferStatusCompleted;
    if (!completed && failure.empty()) failure = failure_text(one, schedule);
  }
  if (!failure.empty()) throw DeviceError(failure);
}

}  // namespace flashattn::metal
