// See cache_files.h.
#include "metal/cache_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <system_error>

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

}  // namespace

std::filesystem::path cache_file(const std::string& kind, const std::string& gpu_name,
                                 const std::string& os_build, const std::string& ending) {
  const std::filesystem::path directory = cache_directory();
  if (directory.empty()) return {};
  return directory / (kind + "-" + as_file_name(gpu_name) + "-" + as_file_name(os_build) + "-" +
                      as_file_name(FLASHATTN_VERSION) + "." + ending);
}

bool is_private(const std::filesystem::path& path) {
  struct stat facts{};
  if (stat(path.c_str(), &facts) != 0) return false;
  const bool ours = facts.st_uid == geteuid() || facts.st_uid == 0;
  return ours && (facts.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

bool make_private(const std::filesystem::path& directory) {
  std::error_code failed;
  if (!std::filesystem::exists(directory, failed)) {
    if (!std::filesystem::create_directories(directory, failed)) return false;
    std::filesystem::permissions(directory, std::filesystem::perms::owner_all, failed);
    if (failed) return false;
  }
  return is_private(directory);
}

}  // namespace flashattn::metal
