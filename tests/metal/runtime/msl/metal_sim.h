// The standard library of translated MSL programs. The translator includes it first; every
// <metal_...> header a shader asks for is empty (stdlib/).
#pragma once

#include "atomic.h"
#include "base.h"
#include "math.h"
#include "matrix.h"
#include "module.h"
#include "simd.h"
#include "vector.h"
