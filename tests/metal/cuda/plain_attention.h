// Attention and its gradients on the GPU, score by score and without storing scores, of problems
// that are too long for the CPU: the two sides of tests/tolerance.py's rule. One entry of the
// batch, head_dim and value_dim both 64 or both 128, every row sees a key.
#pragma once

#include <vector>

#include "problem.h"

enum class Arithmetic {
  kExact,  // float64
  // tests/naive.py: products in float32, softmax in float32, every result rounded to the storage
  // type; gradients by the chain rule through these operations,
  kNaive,
  // or from the exact out and lse, rounded by storing them.
  kNaiveFromStored,
};

struct PlainResult {
  std::vector<double> out, lse, dq, dk, dv;  // in the layouts of problem.h
};

// `stored`: the exact results, where the arithmetic starts from them.
PlainResult plain_attention(const Problem& problem, Storage storage, const Reference& inputs,
                            Arithmetic arithmetic, const PlainResult* stored = nullptr);
