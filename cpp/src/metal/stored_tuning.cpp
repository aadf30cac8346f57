// See stored_tuning.h.
#include "metal/stored_tuning.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

#include "flashattn/error.h"
#include "metal/cache_files.h"

namespace flashattn::metal {

namespace {

constexpr const char* kVariable = "FLASHATTN_TUNING";

bool leaves_files_unread() {
  const char* given = std::getenv(kVariable);
  if (given == nullptr || *given == '\0') return false;
  if (std::string_view(given) == "shipped") return true;
  throw InvalidArgument(std::string(kVariable) + " (" + given + ") must be \"shipped\" or unset");
}

std::optional<TuningTable> read_table(const std::filesystem::path& file) {
  std::error_code ignored;
  if (file.empty() || !std::filesystem::is_regular_file(file, ignored)) return std::nullopt;
  if (!is_private(file) || !is_private(file.parent_path())) return std::nullopt;
  std::ifstream stream(file, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  return TuningTable::parse(text.str());
}

[[noreturn]] void fail(const std::filesystem::path& file, const std::string& reason) {
  throw DeviceError("tune: " + file.string() + " cannot be written: " + reason);
}

}  // namespace

void TuningStore::read() {
  if (source_ != Source::kUnread) return;
  const bool unread = leaves_files_unread();
  source_ = Source::kShipped;
  if (unread) return;
  if (std::optional<TuningTable> found = read_table(file_)) {
    table_ = std::make_shared<const TuningTable>(std::move(*found));
    source_ = Source::kFile;
  }
}

std::shared_ptr<const TuningTable> TuningStore::table() {
  const std::lock_guard lock(mutex_);
  read();
  return table_;
}

void TuningStore::use(std::optional<TuningTable> table) {
  const std::lock_guard lock(mutex_);
  source_ = table ? Source::kProgram : Source::kShipped;
  table_ = table ? std::make_shared<const TuningTable>(std::move(*table)) : nullptr;
}

std::string TuningStore::save(const TuningTable& table) const {
  if (file_.empty()) fail("the tuning table", "there is no home folder; set FLASHATTN_CACHE_DIR");
  if (!make_private(file_.parent_path())) fail(file_, "its folder is not this user's alone");
  const std::filesystem::path temporary = file_.string() + "." + std::to_string(getpid());
  errno = 0;
  {
    std::ofstream stream(temporary, std::ios::binary | std::ios::trunc);
    stream << table.to_text();
    stream.close();
    if (!stream) {
      const std::string reason = std::strerror(errno);
      std::error_code ignored;
      std::filesystem::remove(temporary, ignored);
      fail(file_, reason);
    }
  }
  std::error_code failed;
  using std::filesystem::perms;
  std::filesystem::permissions(temporary, perms::owner_read | perms::owner_write, failed);
  std::filesystem::rename(temporary, file_, failed);
  if (failed) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    fail(file_, failed.message());
  }
  return file_.string();
}

std::string TuningStore::describe() {
  const std::lock_guard lock(mutex_);
  try {
    read();
  } catch (const InvalidArgument& wrong) {
    return wrong.what();
  }
  switch (source_) {
    case Source::kFile:
      return "measured on this device: " + file_.string();
    case Source::kProgram:
      return "set by this program";
    default:
      return "shipped, from a model and not measured; python -m flashattn tune measures";
  }
}

}  // namespace flashattn::metal
