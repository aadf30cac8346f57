// MTLComputeCommandEncoder: bindings and dispatches, with the checks of Metal's validation layer.
#pragma once

#include <Metal/Metal.hpp>
#include <array>
#include <vector>

#include "device/command_buffer.h"

namespace simulated {

class CommandEncoder : public Object {
 public:
  explicit CommandEncoder(CommandBuffer* buffer);
  ~CommandEncoder() override;

  void set_pipeline(PipelineState* pipeline);
  void set_buffer(Buffer* buffer, NS::UInteger offset, NS::UInteger index);
  void set_bytes(const void* bytes, NS::UInteger length, NS::UInteger index);
  void set_threadgroup_memory_length(NS::UInteger length, NS::UInteger index);
  void dispatch_threadgroups(MTL::Size threadgroups, MTL::Size threads_per_threadgroup);
  void dispatch_threads(MTL::Size threads, MTL::Size threads_per_threadgroup);
  void end_encoding();

 private:
  static constexpr NS::UInteger kBufferSlots = 31;
  static constexpr NS::UInteger kMaxBytes = 4096;
  struct Slot {
    Ref<Buffer> buffer;
    std::size_t offset = 0;
    std::vector<std::byte> bytes;
  };

  void check_open(const char* what) const;
  void check_dispatch(MTL::Size grid, MTL::Size threads_per_threadgroup) const;
  void check_bindings() const;
  EncodedDispatch encode(MTL::Size threads_per_threadgroup) const;

  Ref<CommandBuffer> buffer_;
  Ref<PipelineState> pipeline_;
  std::array<Slot, kBufferSlots> slots_;
  std::vector<std::size_t> threadgroup_lengths_;  // bytes, by threadgroup index
  bool ended_ = false;
};

}  // namespace simulated
