// The IOSurface type that metal-cpp names in texture calls.
#pragma once

typedef struct __IOSurface* IOSurfaceRef;
