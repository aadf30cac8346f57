// A call on its way through the GPU: what its parts leave for one another, and everything that has
// to stay until the GPU is done. Calls are used again, so that a call like an earlier one allocates
// nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/visibility.h"
#include "metal/call_buffers.h"
#include "metal/device_facts.h"
#include "metal/encode.h"
#include "metal/fixed_vector.h"
#include "metal/schedule.h"
#include "metal/schedule_tensors.h"

namespace flashattn::metal {

// Addresses [begin, end) of host-visible memory that a call uses.
struct UsedMemory {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  bool written = false;
};

// The addresses of a view; begin and end are equal where the host cannot touch it.
UsedMemory used_memory(const TensorView& view, bool written);

struct Call {
  explicit Call(const BufferSource& source) : buffers(source) {}

  // Lets go of everything but the memory of the lists.
  void clear();
  // Whether the memory of the lists is small enough to be kept for another call.
  bool is_small() const;

  CallBuffers buffers;
  SlotTable slots{};
  DeviceFacts facts;
  std::vector<Visibility> visible;         // [batch]
  std::vector<TileVisibility> mask_tiles;  // of a call with a mask
  Schedule schedule;
  std::vector<const CompiledKernel*> kernels;  // one of each dispatch
  FixedVector<UsedMemory, 16> used;            // one of each tensor
  Submission submission;                       // last: it has ended when the others go
};

// The calls that are not under way. Thread-safe.
class CallPool {
 public:
  struct GiveBack {
    CallPool* pool;
    void operator()(Call* call) const noexcept;
  };
  using Lease = std::unique_ptr<Call, GiveBack>;

  explicit CallPool(const BufferSource& source) : source_(source) {}

  Lease take();

 private:
  static constexpr std::size_t kMostIdle = 2 * kMostInFlight;

  BufferSource source_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Call>> idle_;
};

}  // namespace flashattn::metal
