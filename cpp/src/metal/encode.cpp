// Encoding dispatches and waiting; see encode.h.
#include "metal/encode.h"

#include <atomic>
#include <cassert>
#include <semaphore>
#include <string>
#include <vector>

#include "flashattn/error.h"
#include "metal/objects.h"

namespace flashattn::metal {

namespace {

std::atomic<std::int64_t> nanoseconds_of_gpu{0};

void add_gpu_seconds(double seconds) {
  nanoseconds_of_gpu += static_cast<std::int64_t>(seconds * 1e9);
}

// Places for command buffers in flight. The GPU gives one back, on a thread of the driver's, so
// that no caller ever waits for another one to wait.
std::counting_semaphore<kMostInFlight> places(kMostInFlight);

// A block without captures: handing it over takes no memory.
const MTL::CommandBufferHandler give_place_back = ^(MTL::CommandBuffer*) {
  places.release();
};

void bind_slots(MTL::ComputeCommandEncoder* encoder, const Dispatch& dispatch,
                const SlotTable& slots, std::uint32_t* bound) {
  static_assert(abi::kBufferCount <= 32);
  for (const Binding& binding : bindings(dispatch.key)) {
    // A slot means the same to every kernel of a call, and an encoder keeps what it was told.
    const std::uint32_t bit = std::uint32_t{1} << binding.slot;
    if ((*bound & bit) != 0) continue;
    *bound |= bit;
    const BoundBuffer& found = slots[binding.slot];
    assert(found.buffer != nullptr);
    encoder->setBuffer(found.buffer, found.offset, binding.slot);
  }
  encoder->setBytes(&dispatch.params, sizeof dispatch.params, abi::kBufferParams);
  if (takes_modifiers(dispatch.key)) {
    encoder->setBytes(&dispatch.modifiers, sizeof dispatch.modifiers, abi::kBufferModifiers);
  }
}

struct Range {
  std::size_t first;  // dispatches [first, last)
  std::size_t last;
};

void encode(MTL::ComputeCommandEncoder* encoder, const EncodableWork& work, const Range& range) {
  std::uint32_t bound = 0;  // a bit per slot
  const MTL::ComputePipelineState* current = nullptr;
  for (std::size_t i = range.first; i < range.last; ++i) {
    const Dispatch& dispatch = work.schedule.dispatches[i];
    const MTL::ComputePipelineState* pipeline = work.kernels[i]->pipeline.get();
    if (pipeline != current) encoder->setComputePipelineState(pipeline);
    current = pipeline;
    bind_slots(encoder, dispatch, work.slots, &bound);
    encoder->dispatchThreadgroups(
        MTL::Size(dispatch.threadgroups, 1, 1),
        MTL::Size(static_cast<NS::UInteger>(dispatch.threads_per_threadgroup), 1, 1));
  }
  encoder->endEncoding();
}

// Encodes the dispatches of the range into one command buffer and commits it.
NS::SharedPtr<MTL::CommandBuffer> commit_range(const Device& device, const EncodableWork& work,
                                               const Range& range) {
  places.acquire();
  MTL::CommandBuffer* const given = device.queue()->commandBuffer();
  NS::SharedPtr<MTL::CommandBuffer> commands;
  if (given != nullptr) commands = NS::RetainPtr(given);
  WorkOrder* const order = work.order;
  // Waited for before the encoder is made, because that is where the wait stands in the buffer. Not
  // where the host has waited already: a piece that failed need not have raised the event.
  if (commands && order != nullptr && range.first == 0 && order->done != order->waited) {
    commands->encodeWait(order->event, order->done);
  }
  MTL::ComputeCommandEncoder* encoder = commands ? commands->computeCommandEncoder() : nullptr;
  if (encoder == nullptr) {
    places.release();
    throw DeviceError("metal: the device gives no command buffer");
  }
  commands->setLabel(work.kernels[range.first]->pipeline->label());
  encode(encoder, work, range);
  if (order != nullptr && range.last == work.schedule.dispatches.size()) {
    commands->encodeSignalEvent(order->event, ++order->done);
  }
  commands->addCompletedHandler(give_place_back);
  commands->commit();
  return commands;
}

std::string failure_text(const NS::Error* error, const Schedule& schedule, const Range& range) {
  std::string kernels;
  for (std::size_t i = range.first; i < range.last; ++i) {
    kernels += (kernels.empty() ? "" : ", ") + to_string(schedule.dispatches[i].key);
  }
  return "metal: a command buffer failed: " + describe(error) + "\nits kernels: " + kernels;
}

}  // namespace

double gpu_seconds() { return static_cast<double>(nanoseconds_of_gpu.load()) * 1e-9; }

void Submission::end() {
  for (const Committed& one : committed_) one.commands->waitUntilCompleted();
  committed_.clear();
}

void Submission::commit(const Device& device, const EncodableWork& work) {
  const std::vector<Dispatch>& dispatches = work.schedule.dispatches;
  assert(committed_.empty() && work.kernels.size() == dispatches.size());
  committed_.reserve(dispatches.size());  // nothing may throw once the GPU has been given work
  Range range{0, 0};
  while (range.first < dispatches.size()) {
    const int number = dispatches[range.first].command_buffer;
    range.last = range.first + 1;
    while (range.last < dispatches.size() && dispatches[range.last].command_buffer == number) {
      ++range.last;
    }
    try {
      committed_.push_back({commit_range(device, work, range), range.first, range.last});
    } catch (const DeviceError&) {
      wait(work.schedule);
      throw;
    }
    range.first = range.last;
  }
}

std::string Submission::wait(const Schedule& schedule) {
  std::string failure;
  for (const Committed& one : committed_) {
    one.commands->waitUntilCompleted();
    add_gpu_seconds(one.commands->GPUEndTime() - one.commands->GPUStartTime());
    const bool completed = one.commands->status() == MTL::CommandBufferStatusCompleted;
    if (!completed && failure.empty()) {
      failure = failure_text(one.commands->error(), schedule, {one.first, one.last});
    }
  }
  committed_.clear();
  return failure;
}

bool Submission::is_done() const {
  for (const Committed& one : committed_) {
    const MTL::CommandBufferStatus status = one.commands->status();
    if (status != MTL::CommandBufferStatusCompleted && status != MTL::CommandBufferStatusError) {
      return false;
    }
  }
  return true;
}

}  // namespace flashattn::metal
