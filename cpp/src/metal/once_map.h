// A thread-safe map that makes each value once: the first thread that asks for a key makes it,
// others that ask for the same key wait, and other keys are made at the same time. A failure is
// thrown to everyone who waited and then forgotten, so that a later call tries again.
#pragma once

#include <functional>
#include <future>
#include <mutex>
#include <unordered_map>

namespace flashattn::metal {

template <typename Key, typename Value, typename Hash = std::hash<Key>>
class OnceMap {
 public:
  template <typename Make>
  Value get(const Key& key, Make&& make) {
    std::promise<Value> promise;
    {
      std::unique_lock lock(mutex_);
      if (const auto found = values_.find(key); found != values_.end()) {
        const std::shared_future<Value> value = found->second;
        lock.unlock();
        return value.get();
      }
      values_.emplace(key, promise.get_future().share());
    }
    try {
      Value value = make();
      promise.set_value(value);
      return value;
    } catch (...) {
      {
        const std::lock_guard lock(mutex_);
        values_.erase(key);
      }
      promise.set_exception(std::current_exception());
      throw;
    }
  }

 private:
  std::mutex mutex_;
  std::unordered_map<Key, std::shared_future<Value>, Hash> values_;
};

}  // namespace flashattn::metal
