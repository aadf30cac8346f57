// Compute pipelines by KernelKey, compiled on first use: one library per kernel source, one
// pipeline per set of function constants. Thread-safe; each pipeline is compiled once per process.
#pragma once

#include <Metal/Metal.hpp>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "flashattn/error.h"
#include "metal/kernel_key.h"
#include "metal/once_map.h"
#include "metal/pipeline_archive.h"

namespace flashattn::metal {

// What the device says of a compiled kernel. It allows fewer threads to one that needs many
// registers.
struct PipelineFacts {
  std::string kernel;
  int threads = 0;  // that the kernel is run with
  int most_threads = 0;
};

// A register kernel that the device's compiler does not take, or not with the threads it needs:
// calls go on with weaker ones.
class KernelRefused : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

class PipelineCache {
 public:
  PipelineCache(MTL::Device* device, std::filesystem::path archive_file)
      : device_(device), archive_(device, std::move(archive_file)) {}

  // Throws DeviceError, KernelRefused for a register kernel, with the key, the compiler's log and
  // the source line it names.
  NS::SharedPtr<MTL::ComputePipelineState> get(const KernelKey& key);

  // How many pipelines were compiled by this process, and how many came out of the archive.
  int compiled() const { return compiled_.load(); }
  int from_archive() const { return from_archive_.load(); }

  // Of every pipeline so far, also of those that were refused.
  std::vector<PipelineFacts> facts() const;

 private:
  NS::SharedPtr<MTL::ComputePipelineState> make(const KernelKey& key);
  NS::SharedPtr<MTL::Library> library(const KernelKey& key);
  void check_limits(MTL::ComputePipelineState* state, const KernelKey& key);

  MTL::Device* device_;
  PipelineArchive archive_;
  OnceMap<NS::SharedPtr<MTL::Library>> libraries_;               // by function_name
  OnceMap<NS::SharedPtr<MTL::ComputePipelineState>> pipelines_;  // by to_string(key)
  std::atomic<int> compiled_{0};
  std::atomic<int> from_archive_{0};
  mutable std::mutex facts_mutex_;
  std::vector<PipelineFacts> facts_;
};

// Compiles one source; `what` names it in the error.
NS::SharedPtr<MTL::Library> compile_library(MTL::Device* device, const std::string& source,
                                            const std::string& what);

}  // namespace flashattn::metal
