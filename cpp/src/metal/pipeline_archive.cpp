// Opening, searching and writing the archive; see pipeline_archive.h.
#include "metal/pipeline_archive.h"

#include <unistd.h>

#include <system_error>

#include "metal/cache_files.h"
#include "metal/objects.h"

namespace flashattn::metal {

namespace {

NS::SharedPtr<MTL::BinaryArchive> open_archive(MTL::Device* device,
                                               const std::filesystem::path& file) {
  const auto descriptor = NS::TransferPtr(MTL::BinaryArchiveDescriptor::alloc()->init());
  NS::Error* error = nullptr;
  if (!file.empty()) {
    descriptor->setUrl(NS::URL::fileURLWithPath(to_ns(file.string())));
  }
  return NS::TransferPtr(device->newBinaryArchive(descriptor.get(), &error));
}

}  // namespace

std::filesystem::path archive_path(const std::string& gpu_name, const std::string& os_build) {
  return cache_file("pipelines", gpu_name, os_build, "metalarchive");
}

PipelineArchive::PipelineArchive(MTL::Device* device, std::filesystem::path file)
    : device_(device), file_(std::move(file)) {
  if (file_.empty() || !make_private(file_.parent_path())) return;
  std::error_code ignored;
  if (std::filesystem::is_regular_file(file_, ignored) && is_private(file_)) {
    archive_ = open_archive(device_, file_);
  }
  if (!archive_) archive_ = open_archive(device_, {});
}

void PipelineArchive::attach(MTL::ComputePipelineDescriptor* descriptor) const {
  if (!archive_) return;
  const NS::Object* archives[] = {archive_.get()};
  descriptor->setBinaryArchives(NS::Array::array(archives, 1));
}

NS::SharedPtr<MTL::ComputePipelineState> PipelineArchive::find(
    const MTL::ComputePipelineDescriptor* descriptor) const {
  if (!archive_) return {};
  const std::lock_guard lock(mutex_);
  NS::Error* error = nullptr;
  return NS::TransferPtr(device_->newComputePipelineState(
      descriptor, MTL::PipelineOptionFailOnBinaryArchiveMiss, nullptr, &error));
}

void PipelineArchive::add(const MTL::ComputePipelineDescriptor* descriptor) {
  if (!archive_) return;
  const std::lock_guard lock(mutex_);
  NS::Error* error = nullptr;
  if (!archive_->addComputePipelineFunctions(descriptor, &error)) return;
  const std::filesystem::path temporary = file_.string() + "." + std::to_string(getpid());
  if (!archive_->serializeToURL(NS::URL::fileURLWithPath(to_ns(temporary.string())), &error)) {
    return;
  }
  std::error_code failed;
  using std::filesystem::perms;
  std::filesystem::permissions(temporary, perms::owner_read | perms::owner_write, failed);
  std::filesystem::rename(temporary, file_, failed);
  if (failed) std::filesystem::remove(temporary, failed);
}

}  // namespace flashattn::metal
