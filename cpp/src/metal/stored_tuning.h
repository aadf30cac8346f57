// TuningStore: the TuningTable in force, and the file it is kept in, one per GPU, operating system
// and version. A file that is damaged, or that another user could have written, is as good as none.
// FLASHATTN_TUNING=shipped leaves the file unread.
#pragma once

#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "metal/device_facts.h"
#include "metal/pipeline_cache.h"
#include "metal/tuning_table.h"

namespace flashattn::metal {

class TuningStore {
 public:
  explicit TuningStore(std::filesystem::path file) : file_(std::move(file)) {}

  // Null: the shipped choices. The file is read once, by the first call.
  std::shared_ptr<const TuningTable> table();

  // From now on in this process; nothing: the shipped choices.
  void use(std::optional<TuningTable> table);

  // Writes the file, whole or not at all, and returns its path. Throws DeviceError with the
  // system's reason.
  std::string save(const TuningTable& table) const;

  // Where the choices in force come from, in words; what is wrong with FLASHATTN_TUNING, if
  // anything, which calls throw.
  std::string describe();

 private:
  enum class Source { kUnread, kShipped, kFile, kProgram };
  void read();

  std::filesystem::path file_;
  std::mutex mutex_;
  Source source_ = Source::kUnread;
  std::shared_ptr<const TuningTable> table_;
};

// Of the GPU of this machine; null where there is none. Defined with the backend.
TuningStore* device_tuning();
// What calls are scheduled with now. Needs a GPU.
DeviceFacts device_facts_in_force();
// Every kernel that was compiled so far. Needs a GPU.
std::vector<PipelineFacts> device_pipelines();

}  // namespace flashattn::metal
