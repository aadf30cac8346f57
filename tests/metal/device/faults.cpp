// The one planted fault.
#include "device/faults.h"

#include <mutex>
#include <utility>

namespace simulated {

namespace {

std::mutex mutex;
std::string planted;

}  // namespace

std::string take_planted_fault() {
  const std::lock_guard lock(mutex);
  return std::exchange(planted, {});
}

}  // namespace simulated

extern "C" void flashattn_simulated_fail_next(const char* text) {
  const std::lock_guard lock(simulated::mutex);
  simulated::planted = text;
}
