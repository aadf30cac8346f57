// The class table of a call's mask: which of its tiles no row sees, so that kernels skip them. Read
// from host memory, once per call. Plain C++20.
#pragma once

#include <vector>

#include "core/visibility.h"
#include "flashattn/problem.h"

namespace flashattn::metal {

// `mask` is what the kernels see, in host memory; without an address (memory that only the GPU
// reads) every tile counts as mixed. By the strides that schedule_options.cpp gives the kernels.
// `reused`: an older table, whose memory the new one takes.
std::vector<TileVisibility> mask_table(const AttentionProblem& problem, const TensorView& mask,
                                       std::vector<TileVisibility> reused = {});

}  // namespace flashattn::metal
