// Calls without waiting; see stream.h.
#include "metal/stream.h"

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "flashattn/error.h"
#include "metal/objects.h"
#include "metal/run_call.h"

namespace flashattn::metal {

namespace {

// Ends with its thread, which waits then.
thread_local std::unique_ptr<Stream> of_this_thread;

}  // namespace

Stream::Stream(MTL::Device* device)
    : event_(NS::TransferPtr(device->newEvent())), process_(getpid()) {
  if (!event_) throw DeviceError("metal: the device gives no event");
  order_.event = event_.get();
  pending_.reserve(kMostInFlight);
}

Stream::~Stream() { settle(); }

Stream* Stream::current() { return pending_work() == nullptr ? nullptr : of_this_thread.get(); }

void Stream::open(MTL::Device* device) {
  if (!of_this_thread) of_this_thread = std::make_unique<Stream>(device);
  ++of_this_thread->opened_;
  set_pending_work(of_this_thread.get());
}

std::string Stream::synchronize() {
  if (!of_this_thread) return {};
  of_this_thread->settle();
  return std::exchange(of_this_thread->failure_, {});
}

std::string Stream::close() {
  std::string failure = synchronize();
  if (of_this_thread && --of_this_thread->opened_ == 0) {
    set_pending_work(nullptr);
    of_this_thread.reset();
  }
  return failure;
}

void Stream::settle_first() noexcept {
  Call& call = *pending_.front();
  const AutoreleaseScope scope;
  try {
    std::string failure = call.submission.wait(call.schedule);
    // Kernels that select and have been seen to work leave nothing else; if one does, it is told.
    if (failure.empty() && status_of(call) != abi::kStatusGood) {
      failure = "metal: a kernel met another lane map than it had before: " +
                to_string(call.schedule.dispatches.front().key);
    }
    if (failure_.empty()) failure_ = std::move(failure);
  } catch (const std::bad_alloc&) {
    // Of the text; that something failed is not lost.
    if (failure_.empty()) failure_ = "metal: failed";
  }
  pending_.erase(pending_.begin());
  ++settled_;
}

void Stream::settle() noexcept {
  if (getpid() != process_) {
    // The GPU did not come along into the child, and nobody there can wait for it.
    for (CallPool::Lease& call : pending_) static_cast<void>(call.release());
    settled_ += pending_.size();
    pending_.clear();
    return;
  }
  while (!pending_.empty()) settle_first();
  order_.waited = order_.done;
}

void Stream::push(CallPool::Lease call) {
  const AutoreleaseScope scope;
  while (!pending_.empty() &&
         (pending_.size() == pending_.capacity() || pending_.front()->submission.is_done())) {
    settle_first();
  }
  pending_.push_back(std::move(call));
  ++pushed_;
}

bool Stream::touches(const TensorView& view, bool reads) const {
  const UsedMemory asked = used_memory(view, false);
  return std::any_of(pending_.begin(), pending_.end(), [&](const CallPool::Lease& call) {
    return std::any_of(call->used.begin(), call->used.end(), [&](const UsedMemory& used) {
      return (used.written || reads) && used.begin < asked.end && asked.begin < used.end;
    });
  });
}

}  // namespace flashattn::metal
