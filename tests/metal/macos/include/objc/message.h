// As on the simulated device; zig brings the other system headers of macOS itself.
#pragma once

#include "../../../shim/objc/message.h"
