// MTLEvent: a number that command buffers wait for and raise.
#pragma once

#include <cstdint>
#include <mutex>

#include "objc/object.h"

namespace simulated {

class Event : public Object {
 public:
  Event() : Object("MTLEvent") {}

  void signal(std::uint64_t value) {
    const std::lock_guard lock(mutex_);
    if (value > value_) value_ = value;
  }
  bool has_reached(std::uint64_t value) const {
    const std::lock_guard lock(mutex_);
    return value_ >= value;
  }

 private:
  mutable std::mutex mutex_;
  std::uint64_t value_ = 0;
};

// The event's value at which a command buffer begins, or which it leaves.
struct EventValue {
  Ref<Event> event;
  std::uint64_t value = 0;
};

}  // namespace simulated
