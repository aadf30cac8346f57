// The planted failures.
#include "device/faults.h"

#include <atomic>
#include <mutex>
#include <utility>

namespace simulated {

namespace {

std::mutex mutex;
std::string planted;
std::atomic<bool> no_adoption{false};
std::atomic<bool> no_allocation{false};
std::atomic<bool> no_command_buffers{false};
std::string no_pipelines_of;  // "": of every kernel there is one

}  // namespace

std::string take_planted_fault() {
  const std::lock_guard lock(mutex);
  return std::exchange(planted, {});
}

bool refuses_adoption() { return no_adoption.load(); }
bool refuses_allocation() { return no_allocation.load(); }
bool refuses_command_buffers() { return no_command_buffers.load(); }

bool refuses_pipeline(const std::string& kernel) {
  const std::lock_guard lock(mutex);
  return !no_pipelines_of.empty() && kernel.find(no_pipelines_of) != std::string::npos;
}

}  // namespace simulated

extern "C" void flashattn_simulated_fail_next(const char* text) {
  const std::lock_guard lock(simulated::mutex);
  simulated::planted = text;
}

extern "C" void flashattn_simulated_refuse_adoption(int refuse) {
  simulated::no_adoption = refuse != 0;
}

extern "C" void flashattn_simulated_refuse_allocation(int refuse) {
  simulated::no_allocation = refuse != 0;
}

extern "C" void flashattn_simulated_refuse_command_buffers(int refuse) {
  simulated::no_command_buffers = refuse != 0;
}

extern "C" void flashattn_simulated_refuse_pipelines(const char* text) {
  const std::lock_guard lock(simulated::mutex);
  simulated::no_pipelines_of = text == nullptr ? "" : text;
}
