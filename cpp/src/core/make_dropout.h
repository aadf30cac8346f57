// From a validated call to the integers that decide which weights stay. Kept out of philox.h, which
// kernels include, because this side uses the standard library.
#pragma once

#include "core/philox.h"
#include "flashattn/problem.h"

namespace flashattn {

// Without a shard the global sizes are the call's own. Threshold 0 for a call without dropout.
DropoutRule make_dropout_rule(const AttentionProblem& problem);

}  // namespace flashattn
