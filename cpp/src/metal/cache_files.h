// Files that one process leaves for the next: in FLASHATTN_CACHE_DIR or the user's cache folder,
// named after what they hold, GPU, operating system and version, and used only where nobody else
// could have written them.
#pragma once

#include <filesystem>
#include <string>

namespace flashattn::metal {

// DIRECTORY/`kind`-GPU-OS-VERSION`.ending`; empty when there is no folder for it.
std::filesystem::path cache_file(const std::string& kind, const std::string& gpu_name,
                                 const std::string& os_build, const std::string& ending);

// Whether this user or root alone can have put there what is there.
bool is_private(const std::filesystem::path& path);

// Makes the folder where it is missing, for its owner alone. False when it cannot be used.
bool make_private(const std::filesystem::path& directory);

}  // namespace flashattn::metal
