// A pool of GPU buffers for scratch tables and staging copies: a released buffer is kept for the
// next call until the pool holds more than its limit. Thread-safe.
#pragma once

#include <Metal/Metal.hpp>
#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

namespace flashattn::metal {

// A buffer with what the driver would have to be asked for. The pool or a lease holds its only
// reference.
struct PooledBuffer {
  MTL::Buffer* buffer = nullptr;
  std::byte* contents = nullptr;
  std::size_t length = 0;  // bytes
};

class BufferPool {
 public:
  // Keeps at most `limit` bytes of unused buffers.
  BufferPool(MTL::Device* device, std::size_t limit) : device_(device), limit_(limit) {}
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // A buffer of at least `bytes`, whose content is undefined; given back when the lease ends, which
  // must not be before the GPU is done with it.
  class Lease {
   public:
    Lease(BufferPool* pool, const PooledBuffer& pooled) : pool_(pool), pooled_(pooled) {}
    Lease(Lease&& other) noexcept
        : pool_(other.pool_), pooled_(std::exchange(other.pooled_, PooledBuffer{})) {}
    Lease& operator=(Lease&&) = delete;
    Lease(const Lease&) = delete;
    ~Lease() {
      if (pooled_.buffer != nullptr) pool_->give_back(pooled_);  // never throws
    }
    MTL::Buffer* get() const { return pooled_.buffer; }
    std::byte* contents() const { return pooled_.contents; }

   private:
    BufferPool* pool_;
    PooledBuffer pooled_;
  };

  // Throws DeviceError when the device has not that much memory.
  Lease take(std::size_t bytes);

  std::size_t idle_bytes() const;

 private:
  // There is room for it since take().
  void give_back(const PooledBuffer& pooled) noexcept;

  MTL::Device* device_;
  std::size_t limit_;  // bytes
  mutable std::mutex mutex_;
  std::vector<PooledBuffer> idle_;  // oldest first
  std::size_t leased_ = 0;          // buffers that will come back
};

}  // namespace flashattn::metal
