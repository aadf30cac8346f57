// Running one call whose tensors are bound: tables and scratch memory, kernels, waiting, and
// another try with weaker kernels where the first ones could not do it.
#pragma once

#include <cstdint>

#include "flashattn/problem.h"
#include "metal/call.h"
#include "metal/session.h"

namespace flashattn::metal {

// A pass with the strides that the kernels see; one of the two is there.
struct BoundPass {
  const AttentionProblem& problem;
  const ForwardTensors* forward = nullptr;
  const BackwardTensors* backward = nullptr;

  const TensorView& mask() const { return forward ? forward->inputs.mask : backward->inputs.mask; }
};

// `call` holds the bound tensors and the entries' visibility. On return the results are there,
// unless this thread's stream took the call (stream.h). Throws DeviceError.
void run_call(Session* here, const BoundPass& pass, CallPool::Lease call);

// The word that register kernels left behind; kStatusGood of a call without such.
std::uint32_t status_of(const Call& call);

}  // namespace flashattn::metal
