// The buffers of one call: every tensor becomes an MTLBuffer and an offset, without a copy where
// that is possible.
//   Metal arrays      their own MTLBuffer at byte_offset
//   host memory       the enclosing 16 KiB pages, adopted by newBufferWithBytesNoCopy
//   negative strides,
//   else              a pooled staging buffer: inputs are copied in, outputs copied out by finish()
// They live until the GPU is done with the call; then they may serve another one.
#pragma once

#include <Metal/Metal.hpp>
#include <atomic>
#include <cstdint>
#include <vector>

#include "flashattn/backend.h"
#include "flashattn/tensor.h"
#include "metal/buffer_pool.h"

namespace flashattn::metal {

struct BoundBuffer {
  MTL::Buffer* buffer = nullptr;
  std::uint64_t offset = 0;       // bytes from the buffer's start to element [0,0,0,0]
  std::byte* contents = nullptr;  // of scratch memory and tables: their address for the host
};

struct BoundTensor {
  BoundBuffer where;
  TensorView view;  // the strides that the kernel has to use; staging makes them contiguous
};

// Totals of the process; CopyStats' source.
struct CopyCounters {
  std::atomic<std::uint64_t> adopted_bytes{0};
  std::atomic<std::uint64_t> copied_bytes{0};
};

// Where a call's buffers come from.
struct BufferSource {
  MTL::Device* device = nullptr;
  std::uint64_t max_length = 0;  // bytes that the device takes in one buffer
  BufferPool* pool = nullptr;
  CopyCounters* counters = nullptr;
};

class CallBuffers {
 public:
  explicit CallBuffers(const BufferSource& source) : from_(source) {}

  // A float64 view is staged as float32.
  BoundTensor input(const TensorView& view);
  BoundTensor output(const TensorView& view);
  // Scratch memory of the GPU, undefined content.
  BoundBuffer scratch(std::size_t bytes);
  // Scratch memory that holds a copy of `bytes` bytes from `source`.
  BoundBuffer table(const void* source, std::size_t bytes);
  // After the GPU is done: staged outputs go to where the caller wants them.
  void finish();
  bool has_staged_outputs() const { return !staged_outputs_.empty(); }
  // Lets go of every buffer; what was allocated for the lists of them is kept.
  void clear();

 private:
  struct StagedOutput {
    TensorView destination;
    TensorView source;  // contiguous, inside the staging buffer
  };

  bool adopt(const TensorView& view, BoundTensor* bound);
  BoundTensor stage(TensorView view);

  BufferSource from_;
  std::vector<NS::SharedPtr<MTL::Buffer>> adopted_;
  std::vector<BufferPool::Lease> leases_;
  std::vector<StagedOutput> staged_outputs_;
};

// Whether the host can look at the array. Private memory belongs to the GPU alone: its buffers have
// no contents.
bool host_sees(const TensorView& view);

// The same view with `data` pointing at host-visible memory: for arrays that the host itself reads.
// Throws Unsupported where host_sees says no and there is something to see.
TensorView host_view(const TensorView& view);

}  // namespace flashattn::metal
