// MTLCommandBuffer: a list of dispatches, run by its queue after commit. A checker report or a
// refused dispatch is the buffer's error, as a GPU fault would be.
#pragma once

#include <Metal/Metal.hpp>
#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "device/buffer.h"
#include "device/command_queue.h"
#include "device/event.h"
#include "device/pipeline.h"
#include "objc/error.h"

namespace simulated {

// One encoded dispatch with everything that it keeps alive until it has run.
struct EncodedDispatch {
  Ref<PipelineState> pipeline;
  std::vector<metal_sim::BufferBinding> bindings;  // by buffer index
  std::vector<std::vector<std::byte>> bytes;       // what setBytes copied, by buffer index
  std::vector<Ref<Buffer>> buffers;
  std::vector<std::size_t> threadgroup_lengths;
  std::array<std::uint32_t, 3> threadgroups{};
  std::array<std::uint32_t, 3> threads_per_threadgroup{};
  std::array<std::uint32_t, 3> threads_per_grid{};
};

class CommandBuffer : public Object {
 public:
  explicit CommandBuffer(CommandQueue* queue);
  ~CommandBuffer() override;

  void begin_encoder();
  void end_encoder() { encoder_open_ = false; }
  void add(EncodedDispatch dispatch) { dispatches_.push_back(std::move(dispatch)); }

  void commit();
  void wait_until_completed();
  void add_completed_handler(const void* block);
  void add_wait(Event* event, std::uint64_t value);
  void add_signal(Event* event, std::uint64_t value);
  // Whether every event that it waits for has come.
  bool is_ready() const;
  // Whether one of its dispatches uses a buffer that one of the other's does.
  bool shares_buffer(const CommandBuffer& other) const;
  void run(double* clock);  // on the queue's thread; moves the clock on, in seconds

  MTL::CommandBufferStatus status() const;
  Error* error() const;
  double start_seconds() const { return start_seconds_; }
  double end_seconds() const { return end_seconds_; }

 private:
  std::string run_dispatches();

  Ref<CommandQueue> queue_;
  std::vector<EncodedDispatch> dispatches_;
  std::vector<EventValue> waits_;
  std::vector<EventValue> signals_;
  std::vector<const void*> completed_handlers_;  // heap blocks
  bool encoder_open_ = false;
  Ref<Error> error_;
  double start_seconds_ = 0;
  double end_seconds_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable finished_changed_;
  MTL::CommandBufferStatus status_ = MTL::CommandBufferStatusNotEnqueued;
  bool finished_ = false;
};

}  // namespace simulated
