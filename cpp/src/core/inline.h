// FLASHATTN_INLINE marks what kernels of every instruction set call: inlined always, so that no
// symbol compiled for one instruction set is left for the linker to hand to code of another.
#pragma once

#define FLASHATTN_INLINE inline __attribute__((always_inline))
