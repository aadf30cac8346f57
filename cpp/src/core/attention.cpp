// forward and backward: validate, choose a backend, run it. Nothing is computed here.
#include "flashattn/attention.h"

#include "flashattn/backend.h"
#include "flashattn/problem.h"

namespace flashattn {

void forward(const ForwardTensors& tensors, const AttentionOptions& options) {
  const AttentionProblem problem = make_problem(tensors, options);
  choose_backend(problem, options.backend).forward(problem, tensors);
}

void backward(const BackwardTensors& tensors, const AttentionOptions& options) {
  const AttentionProblem problem = make_problem(tensors, options);
  choose_backend(problem, options.backend).backward(problem, tensors);
}

}  // namespace flashattn
