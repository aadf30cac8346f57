// Compiled pipelines on disk: an MTLBinaryArchive, so that a new process need not compile again. A
// missing, damaged or foreign file is ignored and replaced; nothing here ever fails a call. The
// file holds code that the GPU runs, so nothing is read from or written to a folder or file that
// another user could have changed. Thread-safe.
#pragma once

#include <Metal/Metal.hpp>
#include <filesystem>
#include <mutex>
#include <string>

namespace flashattn::metal {

// Where the pipelines of this GPU, system build and package version are kept: FLASHATTN_CACHE_DIR,
// else the user's cache folder. Empty when there is none or FLASHATTN_CACHE_DIR is empty: then
// nothing is kept.
std::filesystem::path archive_path(const std::string& gpu_name, const std::string& os_build);

class PipelineArchive {
 public:
  // An empty path, or one in a folder that others may write to, keeps nothing. A folder that is
  // made is its owner's alone.
  PipelineArchive(MTL::Device* device, std::filesystem::path file);

  // Makes `descriptor` look into the archive first.
  void attach(MTL::ComputePipelineDescriptor* descriptor) const;
  // The pipeline out of the archive, or null when it is not in there.
  NS::SharedPtr<MTL::ComputePipelineState> find(
      const MTL::ComputePipelineDescriptor* descriptor) const;
  // Adds a pipeline and writes the file, through a temporary one so that readers see all or
  // nothing.
  void add(const MTL::ComputePipelineDescriptor* descriptor);

 private:
  MTL::Device* device_;
  std::filesystem::path file_;
  mutable std::mutex mutex_;
  NS::SharedPtr<MTL::BinaryArchive> archive_;  // null: nothing is kept
};

}  // namespace flashattn::metal
