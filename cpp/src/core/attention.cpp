// forward and backward: read the per-batch values, validate, choose a backend, run it. Nothing is
// computed here.
#include "flashattn/attention.h"

#include "core/make_visibility.h"
#include "core/per_batch.h"
#include "flashattn/backend.h"
#include "flashattn/problem.h"

namespace flashattn {

void forward(const ForwardTensors& tensors, const AttentionOptions& options) {
  ForwardTensors own = tensors;
  const PerBatchValues values(own.inputs);
  const AttentionProblem problem = make_problem(own, options);
  Backend& backend = choose_backend(problem, options.backend);
  backend.forward(problem, problem.packed ? with_batch_axis(own) : own);
}

void backward(const BackwardTensors& tensors, const AttentionOptions& options) {
  BackwardTensors own = tensors;
  const PerBatchValues values(own.inputs);
  const AttentionProblem problem = make_problem(own, options);
  Backend& backend = choose_backend(problem, options.backend);
  backend.backward(problem, problem.packed ? with_batch_axis(own) : own);
}

}  // namespace flashattn
