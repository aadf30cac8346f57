// Which code on a thread is the simulated driver's, and how much the program asked of it: what a
// test counts of a call is then the program's own doing.
#pragma once

#include "objc/live_objects.h"

extern "C" {

// Messages that this thread has sent to objects, those of the driver's own code left out.
FLASHATTN_SIMULATED_EXPORT long flashattn_simulated_messages(void);
// 1 while this thread runs code of the driver.
FLASHATTN_SIMULATED_EXPORT int flashattn_simulated_in_driver(void);

}  // extern "C"

namespace simulated {

// Marks the enclosing block as the driver's.
class DriverCode {
 public:
  DriverCode();
  ~DriverCode();
  DriverCode(const DriverCode&) = delete;
  DriverCode& operator=(const DriverCode&) = delete;
};

// Counts one message, unless the driver sends it.
void count_message();

}  // namespace simulated
