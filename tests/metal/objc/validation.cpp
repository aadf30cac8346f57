// The one way in which the simulated device refuses a call that Metal's validation layer would
// refuse.
#include "objc/validation.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace simulated {

void fail_validation(const char* format, ...) {
  std::fputs("simulated Metal: validation failure: ", stderr);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputs("\n", stderr);
  std::abort();
}

}  // namespace simulated
