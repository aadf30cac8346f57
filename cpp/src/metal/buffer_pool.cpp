// Taking and giving back pooled buffers; see buffer_pool.h.
#include "metal/buffer_pool.h"

#include <algorithm>
#include <string>

#include "flashattn/error.h"

namespace flashattn::metal {

namespace {

constexpr std::size_t kGranularity = 16384;  // one page: smaller steps would only split hairs
constexpr std::size_t kLargestWaste = 2;  // a kept buffer serves requests of at least half its size

}  // namespace

BufferPool::~BufferPool() {
  for (const PooledBuffer& kept : idle_) kept.buffer->release();
}

BufferPool::Lease BufferPool::take(std::size_t bytes) {
  const std::size_t length =
      std::max<std::size_t>(1, (bytes + kGranularity - 1) / kGranularity) * kGranularity;
  {
    const std::lock_guard lock(mutex_);
    idle_.reserve(idle_.size() + leased_ + 1);  // so that giving back allocates nothing
    auto best = idle_.end();
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      const std::size_t has = it->length;
      if (has < length || has > kLargestWaste * length) continue;
      if (best == idle_.end() || has < best->length) best = it;
    }
    if (best != idle_.end()) {
      const PooledBuffer found = *best;
      idle_.erase(best);
      ++leased_;
      return {this, found};
    }
  }
  PooledBuffer made{.buffer = device_->newBuffer(length, MTL::ResourceStorageModeShared),
                    .length = length};
  if (made.buffer == nullptr) {
    throw DeviceError(
        "metal: a buffer of " + std::to_string(length) +
        " bytes cannot be allocated (largest: " + std::to_string(device_->maxBufferLength()) + ")");
  }
  made.contents = static_cast<std::byte*>(made.buffer->contents());
  const std::lock_guard lock(mutex_);
  idle_.reserve(idle_.size() + leased_ + 1);  // other threads may have taken in the meantime
  ++leased_;
  return {this, made};
}

void BufferPool::give_back(const PooledBuffer& pooled) noexcept {
  const std::lock_guard lock(mutex_);
  --leased_;
  idle_.push_back(pooled);
  std::size_t total = 0;
  for (const auto& kept : idle_) total += kept.length;
  while (total > limit_) {
    total -= idle_.front().length;
    idle_.front().buffer->release();
    idle_.erase(idle_.begin());
  }
}

std::size_t BufferPool::idle_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t total = 0;
  for (const auto& kept : idle_) total += kept.length;
  return total;
}

}  // namespace flashattn::metal
