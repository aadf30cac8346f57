// Running, waiting for and the methods of MTLCommandBuffer.
#include "device/command_buffer.h"

#include <algorithm>
#include <atomic>
#include <unordered_set>

#include "device/command_encoder.h"
#include "device/faults.h"
#include "device/virtual_clock.h"
#include "objc/autorelease.h"
#include "objc/blocks.h"
#include "objc/register.h"
#include "objc/validation.h"

namespace simulated {

namespace {

// Runs one dispatch and adds the time that it would take; returns the text of what went wrong, or
// "".
std::string run_dispatch(const EncodedDispatch& dispatch, double* seconds) {
  const metal_sim::DispatchRequest request{
      .threadgroups = dispatch.threadgroups,
      .threads_per_threadgroup = dispatch.threads_per_threadgroup,
      .threads_per_grid = dispatch.threads_per_grid,
      .buffers = dispatch.bindings,
      .threadgroup_lengths = dispatch.threadgroup_lengths,
  };
  std::string text;
  try {
    const metal_sim::DispatchResult result = dispatch.pipeline->kernel().dispatch(request);
    *seconds += modelled_seconds(result.counters, dispatch.threads_per_threadgroup);
    for (const std::string& report : result.reports) {
      text += (text.empty() ? "" : "\n") + report;
    }
  } catch (const metal_sim::RequestError& failure) {
    text = failure.what();
  }
  return text;
}

}  // namespace

CommandBuffer::CommandBuffer(CommandQueue* queue)
    : Object("MTLCommandBuffer"), queue_(Ref<CommandQueue>::retaining(queue)) {}

CommandBuffer::~CommandBuffer() {
  for (const void* handler : completed_handlers_) _Block_release(handler);
}

void CommandBuffer::begin_encoder() {
  if (status() != MTL::CommandBufferStatusNotEnqueued) {
    fail_validation("computeCommandEncoder: the command buffer is already committed");
  }
  if (encoder_open_)
    fail_validation("computeCommandEncoder: the previous encoder has not ended encoding");
  encoder_open_ = true;
}

void CommandBuffer::commit() {
  if (encoder_open_)
    fail_validation("commit: an encoder of this command buffer has not ended encoding");
  {
    const std::lock_guard lock(mutex_);
    if (status_ != MTL::CommandBufferStatusNotEnqueued) {
      fail_validation("commit: the command buffer is committed already");
    }
    status_ = MTL::CommandBufferStatusCommitted;
  }
  queue_->submit(Ref<CommandBuffer>::retaining(this));
}

void CommandBuffer::wait_until_completed() {
  std::unique_lock lock(mutex_);
  if (status_ == MTL::CommandBufferStatusNotEnqueued) {
    fail_validation(
        "waitUntilCompleted: the command buffer is not committed, this would wait forever");
  }
  finished_changed_.wait(lock, [&] { return finished_; });
}

void CommandBuffer::add_completed_handler(const void* block) {
  if (status() != MTL::CommandBufferStatusNotEnqueued) {
    fail_validation("addCompletedHandler: the command buffer is already committed");
  }
  completed_handlers_.push_back(_Block_copy(block));
}

void CommandBuffer::add_wait(Event* event, std::uint64_t value) {
  if (encoder_open_) fail_validation("encodeWaitForEvent: an encoder has not ended encoding");
  waits_.push_back({Ref<Event>::retaining(event), value});
}

void CommandBuffer::add_signal(Event* event, std::uint64_t value) {
  if (encoder_open_) fail_validation("encodeSignalEvent: an encoder has not ended encoding");
  signals_.push_back({Ref<Event>::retaining(event), value});
}

bool CommandBuffer::is_ready() const {
  return std::all_of(waits_.begin(), waits_.end(),
                     [](const EventValue& wait) { return wait.event->has_reached(wait.value); });
}

bool CommandBuffer::shares_buffer(const CommandBuffer& other) const {
  std::unordered_set<const Buffer*> own;
  for (const EncodedDispatch& dispatch : dispatches_) {
    for (const Ref<Buffer>& buffer : dispatch.buffers) own.insert(buffer.get());
  }
  for (const EncodedDispatch& dispatch : other.dispatches_) {
    for (const Ref<Buffer>& buffer : dispatch.buffers) {
      if (own.contains(buffer.get())) return true;
    }
  }
  return false;
}

std::string CommandBuffer::run_dispatches() {
  if (std::string fault = take_planted_fault(); !fault.empty()) return fault;
  for (const EncodedDispatch& dispatch : dispatches_) {
    if (const std::string text = run_dispatch(dispatch, &end_seconds_); !text.empty()) {
      return "kernel " + dispatch.pipeline->kernel().name() + ": " + text;
    }
  }
  return {};
}

void CommandBuffer::run(double* clock) {
  start_seconds_ = *clock;
  end_seconds_ = start_seconds_;
  const std::string failure = run_dispatches();
  *clock = end_seconds_;
  dispatches_.clear();
  for (const EventValue& signal : signals_) signal.event->signal(signal.value);
  {
    const std::lock_guard lock(mutex_);
    if (!failure.empty()) {
      error_ = Ref<Error>::adopting(
          new Error("MTLCommandBufferErrorDomain", MTL::CommandBufferErrorPageFault, failure));
    }
    status_ = failure.empty() ? MTL::CommandBufferStatusCompleted : MTL::CommandBufferStatusError;
  }
  note_in_flight(-1);  // before anyone can know that there is a place for another one
  for (const void* handler : completed_handlers_) {
    auto call = reinterpret_cast<MTL::CommandBufferHandler>(const_cast<void*>(handler));
    call(reinterpret_cast<MTL::CommandBuffer*>(this));
  }
  {
    const std::lock_guard lock(mutex_);
    finished_ = true;
  }
  finished_changed_.notify_all();
}

MTL::CommandBufferStatus CommandBuffer::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

Error* CommandBuffer::error() const {
  const std::lock_guard lock(mutex_);
  return error_.get();
}

void register_command_buffer() {
  const char* const name = "MTLCommandBuffer";
  instance_method(name, "setLabel:", [](CommandBuffer*, SEL, String*) {});
  instance_method(name, "computeCommandEncoder",
                  [](CommandBuffer* self, SEL) { return autoreleased(new CommandEncoder(self)); });
  instance_method(name, "commit", [](CommandBuffer* self, SEL) { self->commit(); });
  instance_method(name, "waitUntilCompleted",
                  [](CommandBuffer* self, SEL) { self->wait_until_completed(); });
  instance_method(name, "addCompletedHandler:", [](CommandBuffer* self, SEL, const void* block) {
    self->add_completed_handler(block);
  });
  instance_method(name, "encodeWaitForEvent:value:",
                  [](CommandBuffer* self, SEL, Event* event, std::uint64_t value) {
                    self->add_wait(event, value);
                  });
  instance_method(name, "encodeSignalEvent:value:",
                  [](CommandBuffer* self, SEL, Event* event, std::uint64_t value) {
                    self->add_signal(event, value);
                  });
  instance_method(name, "status", [](CommandBuffer* self, SEL) { return self->status(); });
  instance_method(name, "error", [](CommandBuffer* self, SEL) { return self->error(); });
  instance_method(name, "GPUStartTime",
                  [](CommandBuffer* self, SEL) { return self->start_seconds(); });
  instance_method(name, "GPUEndTime", [](CommandBuffer* self, SEL) { return self->end_seconds(); });
}

}  // namespace simulated
