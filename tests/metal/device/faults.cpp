// The planted failures.
#include "device/faults.h"

#include <atomic>
#include <mutex>
#include <utility>

namespace simulated {

namespace {

std::mutex mutex;
std::string planted;
std::atomic<bool> refusing{false};

}  // namespace

std::string take_planted_fault() {
  const std::lock_guard lock(mutex);
  return std::exchange(planted, {});
}

bool refuses_adoption() { return refusing.load(); }

}  // namespace simulated

extern "C" void flashattn_simulated_fail_next(const char* text) {
  const std::lock_guard lock(simulated::mutex);
  simulated::planted = text;
}

extern "C" void flashattn_simulated_refuse_adoption(int refuse) {
  simulated::refusing = refuse != 0;
}
