// See driver_code.h.
#include "objc/driver_code.h"

namespace {

thread_local int depth = 0;
thread_local long messages = 0;

}  // namespace

namespace simulated {

DriverCode::DriverCode() { ++depth; }
DriverCode::~DriverCode() { --depth; }

void count_message() {
  if (depth == 0) ++messages;
}

}  // namespace simulated

extern "C" long flashattn_simulated_messages(void) { return messages; }
extern "C" int flashattn_simulated_in_driver(void) { return depth != 0 ? 1 : 0; }
