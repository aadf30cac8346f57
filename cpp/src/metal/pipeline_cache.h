// Compute pipelines by KernelKey, compiled on first use: one library per kernel source, one
// pipeline per set of function constants. Thread-safe; each pipeline is compiled once per process.
#pragma once

#include <Metal/Metal.hpp>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "flashattn/error.h"
#include "metal/kernel_key.h"
#include "metal/once_map.h"
#include "metal/pipeline_archive.h"
#include "metal/schedule.h"

namespace flashattn::metal {

// What the device says of a compiled kernel. It allows fewer threads to one that needs many
// registers.
struct PipelineFacts {
  std::string kernel;
  int threads = 0;  // that the kernel is run with
  int most_threads = 0;
};

// A kernel that can be run. Its cache keeps it for good.
struct CompiledKernel {
  NS::SharedPtr<MTL::ComputePipelineState> pipeline;
  // What lane_map_generation() was when a run of it was last seen to end well; 0: never.
  mutable std::atomic<int> proven{0};
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
  const CompiledKernel& get(const KernelKey& key);

  // The kernels of all dispatches, in place of what `kernels` holds; throws likewise. Takes no
  // memory and one lock where all of them are there.
  void get_all(const std::vector<Dispatch>& dispatches,
               std::vector<const CompiledKernel*>* kernels);

  // How many pipelines were compiled by this process, and how many came out of the archive.
  int compiled() const { return compiled_.load(); }
  int from_archive() const { return from_archive_.load(); }

  // Of every pipeline so far, also of those that were refused.
  std::vector<PipelineFacts> facts() const;

 private:
  using Kernels =
      std::unordered_map<KernelKey, std::unique_ptr<const CompiledKernel>, KernelKeyHash>;

  const CompiledKernel* find(const KernelKey& key);
  NS::SharedPtr<MTL::ComputePipelineState> make(const KernelKey& key);
  NS::SharedPtr<MTL::Library> library(const KernelKey& key);
  void check_limits(MTL::ComputePipelineState* state, const KernelKey& key);

  MTL::Device* device_;
  PipelineArchive archive_;
  OnceMap<std::string, NS::SharedPtr<MTL::Library>> libraries_;  // by function_name
  OnceMap<KernelKey, const CompiledKernel*, KernelKeyHash> making_;
  std::mutex kernels_mutex_;
  Kernels kernels_;  // those that are ready
  std::atomic<int> compiled_{0};
  std::atomic<int> from_archive_{0};
  mutable std::mutex facts_mutex_;
  std::vector<PipelineFacts> facts_;
};

// Compiles one source; `what` names it in the error.
NS::SharedPtr<MTL::Library> compile_library(MTL::Device* device, const std::string& source,
                                            const std::string& what);

}  // namespace flashattn::metal
