// A pool of GPU buffers for scratch tables and staging copies: a released buffer is kept for the
// next call until the pool holds more than its limit. Thread-safe.
#pragma once

#include <Metal/Metal.hpp>
#include <cstddef>
#include <mutex>
#include <vector>

namespace flashattn::metal {

class BufferPool {
 public:
  // Keeps at most `limit` bytes of unused buffers.
  BufferPool(MTL::Device* device, std::size_t limit) : device_(device), limit_(limit) {}

  // A buffer of at least `bytes`, whose content is undefined; given back when the lease ends, which
  // must not be before the GPU is done with it.
  class Lease {
   public:
    Lease(BufferPool* pool, NS::SharedPtr<MTL::Buffer> buffer)
        : pool_(pool), buffer_(std::move(buffer)) {}
    Lease(Lease&& other) noexcept = default;
    Lease& operator=(Lease&&) = delete;
    Lease(const Lease&) = delete;
    ~Lease() {
      if (buffer_) pool_->give_back(std::move(buffer_));  // never throws
    }
    MTL::Buffer* get() const { return buffer_.get(); }

   private:
    BufferPool* pool_;
    NS::SharedPtr<MTL::Buffer> buffer_;
  };

  // Throws DeviceError when the device has not that much memory.
  Lease take(std::size_t bytes);

  std::size_t idle_bytes() const;

 private:
  // There is room for it since take().
  void give_back(NS::SharedPtr<MTL::Buffer> buffer) noexcept;

  MTL::Device* device_;
  std::size_t limit_;  // bytes
  mutable std::mutex mutex_;
  std::vector<NS::SharedPtr<MTL::Buffer>> idle_;  // oldest first
  std::size_t leased_ = 0;                        // buffers that will come back
};

}  // namespace flashattn::metal
