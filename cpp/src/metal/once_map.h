// A thread-safe map that makes each value once: the first thread that asks for a name makes it,
// others that ask for the same name wait, and other names are made at the same time. A failure is
// thrown to everyone who waited and then forgotten, so that a later call tries again.
#pragma once

#include <future>
#include <mutex>
#include <string>
#include <unordered_map>

namespace flashattn::metal {

template <typename Value>
class OnceMap {
 public:
  template <typename Make>
  Value get(const std::string& name, Make&& make) {
    std::promise<Value> promise;
    {
      std::unique_lock lock(mutex_);
      if (const auto found = values_.find(name); found != values_.end()) {
        const std::shared_future<Value> value = found->second;
        lock.unlock();
        return value.get();
      }
      values_.emplace(name, promise.get_future().share());
    }
    try {
      Value value = make();
      promise.set_value(value);
      return value;
    } catch (...) {
      {
        const std::lock_guard lock(mutex_);
        values_.erase(name);
      }
      promise.set_exception(std::current_exception());
      throw;
    }
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_future<Value>> values_;
};

}  // namespace flashattn::metal
