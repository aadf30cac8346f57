// The checks and methods of MTLComputeCommandEncoder.
#include "device/command_encoder.h"

#include <algorithm>
#include <cstring>

#include "objc/register.h"
#include "objc/validation.h"

namespace simulated {

namespace {

std::array<std::uint32_t, 3> as_array(MTL::Size size) {
  return {static_cast<std::uint32_t>(size.width), static_cast<std::uint32_t>(size.height),
          static_cast<std::uint32_t>(size.depth)};
}

unsigned long printable(std::size_t number) { return number; }

}  // namespace

CommandEncoder::CommandEncoder(CommandBuffer* buffer)
    : Object("MTLComputeCommandEncoder"), buffer_(Ref<CommandBuffer>::retaining(buffer)) {
  buffer_->begin_encoder();
}

CommandEncoder::~CommandEncoder() {
  if (!ended_) fail_validation("a command encoder was released without endEncoding");
}

void CommandEncoder::check_open(const char* what) const {
  if (ended_) fail_validation("%s: the encoder has ended encoding", what);
}

void CommandEncoder::set_pipeline(PipelineState* pipeline) {
  check_open("setComputePipelineState");
  if (pipeline == nullptr) fail_validation("setComputePipelineState: the pipeline must not be nil");
  pipeline_ = Ref<PipelineState>::retaining(pipeline);
}

void CommandEncoder::set_buffer(Buffer* buffer, NS::UInteger offset, NS::UInteger index) {
  check_open("setBuffer");
  if (index >= kBufferSlots)
    fail_validation("setBuffer: index %lu must be below 31", printable(index));
  if (buffer != nullptr && offset >= buffer->length()) {
    fail_validation("setBuffer: offset %lu must be below the buffer's length %lu",
                    printable(offset), printable(buffer->length()));
  }
  slots_[index] = {.buffer = Ref<Buffer>::retaining(buffer), .offset = offset, .bytes = {}};
}

void CommandEncoder::set_bytes(const void* bytes, NS::UInteger length, NS::UInteger index) {
  check_open("setBytes");
  if (index >= kBufferSlots)
    fail_validation("setBytes: index %lu must be below 31", printable(index));
  if (bytes == nullptr || length == 0 || length > kMaxBytes) {
    fail_validation("setBytes: length %lu must be 1..4096", printable(length));
  }
  const auto* first = static_cast<const std::byte*>(bytes);
  slots_[index] = {.buffer = {}, .offset = 0, .bytes = {first, first + length}};
}

void CommandEncoder::set_threadgroup_memory_length(NS::UInteger length, NS::UInteger index) {
  check_open("setThreadgroupMemoryLength");
  if (index >= kBufferSlots)
    fail_validation("setThreadgroupMemoryLength: index %lu", printable(index));
  if (length % 16 != 0) {
    fail_validation("setThreadgroupMemoryLength: length %lu must be a multiple of 16",
                    printable(length));
  }
  if (threadgroup_lengths_.size() <= index) threadgroup_lengths_.resize(index + 1);
  threadgroup_lengths_[index] = length;
}

void CommandEncoder::check_dispatch(MTL::Size grid, MTL::Size threads_per_threadgroup) const {
  check_open("dispatch");
  if (!pipeline_) fail_validation("dispatch: no compute pipeline state is set");
  const metal_sim::Kernel& kernel = pipeline_->kernel();
  const char* name = kernel.name().c_str();
  const std::size_t threads = threads_per_threadgroup.width * threads_per_threadgroup.height *
                              threads_per_threadgroup.depth;
  if (threads == 0 || threads > kernel.max_total_threads_per_threadgroup()) {
    fail_validation("dispatch of %s: %lu threads per threadgroup must be 1..%u", name,
                    printable(threads), kernel.max_total_threads_per_threadgroup());
  }
  if (grid.width == 0 || grid.height == 0 || grid.depth == 0) {
    fail_validation("dispatch of %s: the grid must not be empty", name);
  }
  std::size_t bytes = kernel.static_threadgroup_bytes();
  for (const std::size_t length : threadgroup_lengths_) bytes += length;
  if (bytes > metal_sim::kMaxThreadgroupBytes) {
    fail_validation("dispatch of %s: threadgroup memory %lu must not exceed %lu", name,
                    printable(bytes), printable(metal_sim::kMaxThreadgroupBytes));
  }
  check_bindings();
}

void CommandEncoder::check_bindings() const {
  const metal_sim::Kernel& kernel = pipeline_->kernel();
  for (const metal_sim::Argument& argument : kernel.arguments()) {
    if (argument.kind == metal_sim::ArgumentKind::kThreadgroup) {
      const bool set =
          argument.index < threadgroup_lengths_.size() && threadgroup_lengths_[argument.index] != 0;
      if (!set) {
        fail_validation("dispatch of %s: missing threadgroup memory at index %u for %s",
                        kernel.name().c_str(), argument.index, argument.name.c_str());
      }
      continue;
    }
    const Slot& slot = slots_.at(argument.index);
    if (!slot.buffer && slot.bytes.empty()) {
      fail_validation("dispatch of %s: missing buffer binding at index %u for %s",
                      kernel.name().c_str(), argument.index, argument.name.c_str());
    }
    const std::size_t alignment =
        std::min<std::size_t>(std::max<std::size_t>(argument.element_size, 1), 4);
    if (slot.offset % alignment != 0) {
      fail_validation("dispatch of %s: offset %lu of %s must be a multiple of %lu",
                      kernel.name().c_str(), printable(slot.offset), argument.name.c_str(),
                      printable(alignment));
    }
    if (slot.bytes.empty() ? false : !argument.read_only) {
      fail_validation("dispatch of %s: setBytes is bound to %s, which the kernel may write",
                      kernel.name().c_str(), argument.name.c_str());
    }
  }
}

EncodedDispatch CommandEncoder::encode(MTL::Size threads_per_threadgroup) const {
  EncodedDispatch dispatch{
      .pipeline = pipeline_,
      .bindings = std::vector<metal_sim::BufferBinding>(kBufferSlots),
      .bytes = std::vector<std::vector<std::byte>>(kBufferSlots),
      .buffers = {},
      .threadgroup_lengths = threadgroup_lengths_,
      .threads_per_threadgroup = as_array(threads_per_threadgroup),
  };
  for (std::size_t i = 0; i < kBufferSlots; ++i) {
    const Slot& slot = slots_[i];
    if (slot.buffer) {
      dispatch.bindings[i] = {slot.buffer->contents() + slot.offset,
                              slot.buffer->length() - slot.offset};
      dispatch.buffers.push_back(slot.buffer);
    } else if (!slot.bytes.empty()) {
      dispatch.bytes[i] = slot.bytes;
      dispatch.bindings[i] = {dispatch.bytes[i].data(), slot.bytes.size()};
    }
  }
  return dispatch;
}

void CommandEncoder::dispatch_threadgroups(MTL::Size threadgroups,
                                           MTL::Size threads_per_threadgroup) {
  check_dispatch(threadgroups, threads_per_threadgroup);
  EncodedDispatch dispatch = encode(threads_per_threadgroup);
  dispatch.threadgroups = as_array(threadgroups);
  buffer_->add(std::move(dispatch));
}

void CommandEncoder::dispatch_threads(MTL::Size threads, MTL::Size threads_per_threadgroup) {
  check_dispatch(threads, threads_per_threadgroup);
  EncodedDispatch dispatch = encode(threads_per_threadgroup);
  dispatch.threads_per_grid = as_array(threads);
  for (std::size_t axis = 0; axis < 3; ++axis) {
    const std::uint32_t step = dispatch.threads_per_threadgroup[axis];
    dispatch.threadgroups[axis] = (dispatch.threads_per_grid[axis] + step - 1) / step;
  }
  buffer_->add(std::move(dispatch));
}

void CommandEncoder::end_encoding() {
  check_open("endEncoding");
  ended_ = true;
  buffer_->end_encoder();
}

void register_command_encoder() {
  const char* const name = "MTLComputeCommandEncoder";
  instance_method(name, "setLabel:", [](CommandEncoder*, SEL, String*) {});
  instance_method(name, "pushDebugGroup:", [](CommandEncoder*, SEL, String*) {});
  instance_method(name, "popDebugGroup", [](CommandEncoder*, SEL) {});
  instance_method(
      name, "setComputePipelineState:", [](CommandEncoder* self, SEL, PipelineState* pipeline) {
        self->set_pipeline(pipeline);
      });
  instance_method(name, "setBuffer:offset:atIndex:",
                  [](CommandEncoder* self, SEL, Buffer* buffer, NS::UInteger offset,
                     NS::UInteger index) { self->set_buffer(buffer, offset, index); });
  instance_method(name, "setBytes:length:atIndex:",
                  [](CommandEncoder* self, SEL, const void* bytes, NS::UInteger length,
                     NS::UInteger index) { self->set_bytes(bytes, length, index); });
  instance_method(name, "setThreadgroupMemoryLength:atIndex:",
                  [](CommandEncoder* self, SEL, NS::UInteger length, NS::UInteger index) {
                    self->set_threadgroup_memory_length(length, index);
                  });
  instance_method(name, "dispatchThreadgroups:threadsPerThreadgroup:",
                  [](CommandEncoder* self, SEL, MTL::Size threadgroups, MTL::Size threads) {
                    self->dispatch_threadgroups(threadgroups, threads);
                  });
  instance_method(name, "dispatchThreads:threadsPerThreadgroup:",
                  [](CommandEncoder* self, SEL, MTL::Size grid, MTL::Size threads) {
                    self->dispatch_threads(grid, threads);
                  });
  instance_method(name, "memoryBarrierWithScope:", [](CommandEncoder*, SEL, MTL::BarrierScope) {});
  instance_method(name, "endEncoding", [](CommandEncoder* self, SEL) { self->end_encoding(); });
}

}  // namespace simulated
