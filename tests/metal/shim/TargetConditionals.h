// metal-cpp asks which Apple system it is compiled for; the simulated device answers "macOS".
#pragma once

#define TARGET_OS_OSX 1
#define TARGET_OS_MAC 1
