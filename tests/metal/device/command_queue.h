// MTLCommandQueue: runs committed command buffers in order on a thread of its own.
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
    std::deque<Ref<CommandBuffer>> waiting;
    bool stopping = false;
  };
  static void work(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
  std::thread worker_;
};

}  // namespace simulated
