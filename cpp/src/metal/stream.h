// Stream: calls of one thread that are given to the GPU one after the other without waiting for
// any. While a thread has one open, its calls return as soon as they are committed; closing waits.
//
// A call is left pending only if nothing is left for the host to do about it:
//   * its kernels select (KernelChoice), so that values which are not finite void no result;
//   * every kernel of it has been seen to end well, so that none will refuse the device's lane map;
//   * its outputs were adopted: results in staging memory have to be copied out.
// Any other call waits, and is run again if need be, before the next one is begun. So no pending
// call ever reads a result that is void.
//
// What the host itself reads or writes inside a call it waits for (core/pending.h).
#pragma once

#include <sys/types.h>

#include <Metal/Metal.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "core/pending.h"
#include "metal/call.h"
#include "metal/encode.h"

namespace flashattn::metal {

class Stream : public PendingWork {
 public:
  // Throws DeviceError when the device gives no event.
  explicit Stream(MTL::Device* device);
  ~Stream() override;

  // The open one of this thread; null where there is none, or its calls are not to be left pending.
  static Stream* current();

  // Opens this thread's stream, or opens it once more: streams nest, and share their calls.
  static void open(MTL::Device* device);
  // Waits, and closes it if it was opened once. The text of the first failure since the last one
  // that was told, or "". Nothing happens without an open stream.
  static std::string close();
  // Waits; the text likewise.
  static std::string synchronize();

  // Committed calls that nobody has waited for.
  void push(CallPool::Lease call);
  WorkOrder* order() { return &order_; }

  // Calls so far that were left pending, and how many of those are done.
  std::uint64_t pushed() const { return pushed_; }
  std::uint64_t settled() const { return settled_; }

  void settle() noexcept override;
  bool touches(const TensorView& view, bool reads) const override;

 private:
  void settle_first() noexcept;

  NS::SharedPtr<MTL::Event> event_;
  WorkOrder order_;
  std::vector<CallPool::Lease> pending_;  // oldest first
  std::uint64_t pushed_ = 0;
  std::uint64_t settled_ = 0;
  std::string failure_;  // the first that was not told
  int opened_ = 0;
  pid_t process_;
};

// Stream::open on the GPU of this machine. Throws Unsupported where there is none to be used.
// Defined with the backend.
void open_stream();

}  // namespace flashattn::metal
