// Memory of the GPU, and the check of every call to CUDA.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK_CUDA(call)                                                    \
  do {                                                                      \
    const cudaError_t status = (call);                                      \
    if (status != cudaSuccess) {                                            \
      std::fprintf(stderr, "CUDA error at %s:%d: %s\n", __FILE__, __LINE__, \
                   cudaGetErrorString(status));                             \
      std::exit(2);                                                         \
    }                                                                       \
  } while (0)

// An allocation with nothing around it: an access past the end is an access past an allocation.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    CHECK_CUDA(cudaMalloc(&pointer_, count * sizeof(T)));
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { write(values); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(pointer_); }

  T* pointer() const { return pointer_; }
  void write(const std::vector<T>& values) {
    CHECK_CUDA(
        cudaMemcpy(pointer_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    CHECK_CUDA(cudaMemcpy(values.data(), pointer_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  std::size_t count_;
  T* pointer_ = nullptr;
};
