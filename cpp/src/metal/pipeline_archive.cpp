// Opening, searching and writing the archive; see pipeline_archive.h.
#include "metal/pipeline_archive.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <system_error>

#include "metal/objects.h"

namespace flashattn::metal {

namespace {

std::filesystem::path cache_directory() {
  if (const char* given = std::getenv("FLASHATTN_CACHE_DIR")) return given;
  const char* home = std::getenv("HOME");
  if (home == nullptr || *home == '\0') return {};
#ifdef __APPLE__
  return std::filesystem::path(home) / "Library" / "Caches" / "flashattn";
#else
  return std::filesystem::path(home) / ".cache" / "flashattn";
#endif
}

// Whether this user or root alone can have put there what is there.
bool is_private(const std::filesystem::path& path) {
  struct stat facts{};
  if (stat(path.c_str(), &facts) != 0) return false;
  const bool ours = facts.st_uid == geteuid() || facts.st_uid == 0;
  return ours && (facts.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

// Makes the folder where it is missing, for its owner alone. False when it cannot be used.
bool make_private(const std::filesystem::path& directory) {
  std::error_code failed;
  if (!std::filesystem::exists(directory, failed)) {
    if (!std::filesystem::create_directories(directory, failed)) return false;
    std::filesystem::permissions(directory, std::filesystem::perms::owner_all, failed);
    if (failed) return false;
  }
  return is_private(directory);
}

// Letters, digits and dots only: the text becomes part of a file name.
std::string as_file_name(const std::string& text) {
  std::string name;
  for (const char c : text) {
    const bool plain =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.';
    name += plain ? c : '-';
  }
  return name;
}

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
  const std::filesystem::path directory = cache_directory();
  if (directory.empty()) return {};
  return directory / ("pipelines-" + as_file_name(gpu_name) + "-" + as_file_name(os_build) + "-" +
                      as_file_name(FLASHATTN_VERSION) + ".metalarchive");
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
