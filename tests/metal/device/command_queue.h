// MTLCommandQueue: runs committed command buffers on a thread of its own, in order, or in the order
// that a test wants to see: Metal promises one only where command buffers use the same buffer, or
// where an event makes it.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "objc/object.h"

namespace simulated {

class CommandBuffer;

class CommandQueue : public Object {
 public:
  CommandQueue();
  ~CommandQueue() override;
  void submit(Ref<CommandBuffer> buffer);

 private:
  // Outlives the queue object: a command buffer retains its queue, so the queue's last reference
  // may go on the worker thread itself.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Ref<CommandBuffer>> waiting;  // oldest first
    bool stopping = false;
  };
  static Ref<CommandBuffer> take_next(State& state);
  static void work(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
  std::thread worker_;
};

}  // namespace simulated
