// The worker thread and the methods of MTLCommandQueue.
#include "device/command_queue.h"

#include <Metal/Metal.hpp>
#include <algorithm>
#include <chrono>

#include "device/command_buffer.h"
#include "device/device.h"
#include "device/faults.h"
#include "objc/autorelease.h"
#include "objc/register.h"
#include "objc/string.h"
#include "objc/validation.h"

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
    note_in_flight(1);
  }
  state_->changed.notify_all();
}

// The oldest, or with reordered_work() the newest that may run before all that wait with it.
Ref<CommandBuffer> CommandQueue::take_next(State& state) {
  auto& waiting = state.waiting;
  auto chosen = waiting.begin();
  if (reorders_work()) {
    for (auto it = waiting.end() - 1; it != waiting.begin(); --it) {
      const bool bound = std::any_of(waiting.begin(), it, [it](const Ref<CommandBuffer>& older) {
        return older->shares_buffer(**it);
      });
      if (bound || !(*it)->is_ready()) continue;
      chosen = it;
      break;
    }
  }
  if (!(*chosen)->is_ready()) {
    fail_validation("a command buffer waits for an event that no earlier one signals");
  }
  Ref<CommandBuffer> next = std::move(*chosen);
  waiting.erase(chosen);
  return next;
}

void CommandQueue::work(const std::shared_ptr<State>& state) {
  double clock = 0;  // seconds that the GPU has worked for this queue, by virtual_clock.h
  for (;;) {
    Ref<CommandBuffer> next;
    {
      std::unique_lock lock(state->mutex);
      while (!state->stopping && (state->waiting.empty() || holds_work())) {
        state->changed.wait_for(lock, std::chrono::milliseconds(holds_work() ? 1 : 1000));
      }
      if (state->waiting.empty()) return;
      next = take_next(*state);
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
  instance_method(name, "setLabel:", [](CommandQueue*, SEL, String*) {});
  instance_method(name, "commandBuffer", [](CommandQueue* self, SEL) -> CommandBuffer* {
    return refuses_command_buffers() ? nullptr : autoreleased(new CommandBuffer(self));
  });
}

}  // namespace simulated
