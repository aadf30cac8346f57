// What a block of code asks of the machine: linked into a program, this counts operator new and
// pthread_mutex_lock of the thread that counts, those of the simulated driver left out.
#pragma once

namespace flashattn::testing {

struct Asked {
  long messages = 0;     // Objective-C selectors sent
  long allocations = 0;  // operator new
  long locks = 0;        // mutexes locked
  long objects = 0;      // Objective-C objects that the driver made, for whatever thread
};

// Starts counting on this thread.
void start_counting();
// Stops, and tells what was counted.
Asked stop_counting();

}  // namespace flashattn::testing
