// The worker thread and the methods of MTLCommandQueue.
#include "device/command_queue.h"

#include <Metal/Metal.hpp>

#include "device/command_buffer.h"
#include "device/device.h"
#include "device/faults.h"
#include "objc/autorelease.h"
#include "objc/register.h"
#include "objc/string.h"

namespace simulated {

CommandQueue::CommandQueue()
    : Object("MTLCommandQueue"),
      state_(std::make_shared<State>()),
      worker_([state = state_] { work(state); }) {}

CommandQueue::~CommandQueue() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->changed.notify_all();
  if (worker_.get_id() == std::this_thread::get_id()) {
    worker_.detach();
  } else {
    worker_.join();
  }
}

void CommandQueue::submit(Ref<CommandBuffer> buffer) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->waiting.push_back(std::move(buffer));
  }
  state_->changed.notify_all();
}

void CommandQueue::work(const std::shared_ptr<State>& state) {
  double clock = 0;  // seconds that the GPU has worked for this queue, by virtual_clock.h
  for (;;) {
    Ref<CommandBuffer> next;
    {
      std::unique_lock lock(state->mutex);
      state->changed.wait(lock, [&] { return state->stopping || !state->waiting.empty(); });
      if (state->waiting.empty()) return;
      next = std::move(state->waiting.front());
      state->waiting.pop_front();
    }
    auto* pool = new AutoreleasePool;
    next->run(&clock);
    next = {};
    pool->release();
  }
}

CommandQueue* make_command_queue() { return new CommandQueue; }

void register_command_queue() {
  const char* const name = "MTLCommandQueue";
  instance_method(name, "setLabel:", +[](CommandQueue*, SEL, String*) {});
  instance_method(
      name, "commandBuffer", +[](CommandQueue* self, SEL) -> CommandBuffer* {
        return refuses_command_buffers() ? nullptr : autoreleased(new CommandBuffer(self));
      });
}

}  // namespace simulated
