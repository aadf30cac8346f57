// The CPU backend: problems and views in, jobs for the kernels of the best instruction set out. It
// reads every array in place, whatever its strides, and answers here, once, the problems in which
// there is nothing to compute. Relies on dispatch.h, thread_pool.h and the schedules of the three
// passes.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "flashattn/backend.h"

namespace flashattn::cpu {

class CpuBackend final : public Backend {
 public:
  std::string name() const override { return "cpu"; }
  std::string device() const override;
  Support available() const override;
  std::vector<std::string> features() const override;
  Support supports(const AttentionProblem& problem) const override;
  void forward(const AttentionProblem& problem, const ForwardTensors& tensors) override;
  void backward(const AttentionProblem& problem, const BackwardTensors& tensors) override;
  CopyStats copy_stats(bool reset) override;

 private:
  // A call's tensors: read in place, unless one came as a copy.
  void count_bytes(std::initializer_list<TensorView> views);

  std::atomic<std::uint64_t> adopted_bytes_{0};
  std::atomic<std::uint64_t> copied_bytes_{0};
};

}  // namespace flashattn::cpu
