// What a call's options are to the kernels: parameters, tables, and which kernel has to know which
// option. Only shapes and strides are read here; what a mask holds is mask_table.h's.
#pragma once

#include "core/mask_tiles.h"
#include "flashattn/attention.h"
#include "flashattn/problem.h"
#include "metal/kernel_key.h"
#include "shaders/abi.h"

namespace flashattn::metal {

// The views that only some options have; the last three are rank 0 in a forward pass.
struct OptionViews {
  TensorView mask{};
  TensorView alibi_slopes{};
  TensorView sinks{};
  TensorView dmask{};
  TensorView dalibi_slopes{};
  TensorView dsinks{};
};

abi::ModifierParams modifier_params(const AttentionProblem& problem, const OptionViews& views);

// Of the options of the problem those that change this kind of kernel.
KernelOptions kernel_options(KernelKind kind, const AttentionProblem& problem);

// The class table of the mask: its shape, without memory. Broadcast axes have one tile.
MaskTiles mask_tiles_of(const AttentionProblem& problem, const TensorView& mask);

}  // namespace flashattn::metal
