// The planted failures.
#include "device/faults.h"

#include <algorithm>
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
std::atomic<bool> held{false};
std::atomic<bool> reordered{false};
int in_flight = 0;
int most_in_flight = 0;
std::string no_pipelines_of;  // "": of every kernel there is one

}  // namespace

std::string take_planted_fault() {
  const std::lock_guard lock(mutex);
  return std::exchange(planted, {});
}

bool refuses_adoption() { return no_adoption.load(); }
bool refuses_allocation() { return no_allocation.load(); }
bool refuses_command_buffers() { return no_command_buffers.load(); }

bool holds_work() { return held.load(); }
bool reorders_work() { return reordered.load(); }

void note_in_flight(int change) {
  const std::lock_guard lock(mutex);
  in_flight += change;
  most_in_flight = std::max(most_in_flight, in_flight);
}

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

extern "C" void flashattn_simulated_hold_work(int hold) { simulated::held = hold != 0; }

extern "C" void flashattn_simulated_reorder_work(int reorder) {
  simulated::reordered = reorder != 0;
}

extern "C" int flashattn_simulated_most_in_flight(void) {
  const std::lock_guard lock(simulated::mutex);
  return std::exchange(simulated::most_in_flight, simulated::in_flight);
}

extern "C" void flashattn_simulated_refuse_pipelines(const char* text) {
  const std::lock_guard lock(simulated::mutex);
  simulated::no_pipelines_of = text == nullptr ? "" : text;
}
