// What metal-cpp uses out of CoreFoundation: one type, and the C headers that Apple's header pulls
// in.
#pragma once

#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef double CFTimeInterval;
typedef const void* CFTypeRef;
