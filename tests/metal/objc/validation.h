// What Metal's validation layer does with a caller's mistake: say what is wrong and abort.
#pragma once

namespace simulated {

// Prints "simulated Metal: validation failure: ..." to stderr and aborts the process.
[[noreturn]] void fail_validation(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace simulated
