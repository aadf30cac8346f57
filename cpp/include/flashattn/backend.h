// Backends: who can compute a problem, in which order they are asked, and what they say when they
// cannot.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flashattn/attention.h"
#include "flashattn/problem.h"

namespace flashattn {

struct Support {
  bool ok = false;
  std::string reason;  // empty when ok
};

// Bytes a backend read or wrote in place, and bytes it had to copy to get them into a usable form.
struct CopyStats {
  std::uint64_t adopted_bytes = 0;
  std::uint64_t copied_bytes = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string name() const = 0;    // "cpu", "metal": what `backend=` takes
  virtual std::string device() const = 0;  // for people: the processor or GPU and how it is driven
  // Whether the device is there at all, and why not.
  virtual Support available() const = 0;
  // False for devices that are only ever used when named (a simulated one).
  virtual bool chosen_by_default() const { return true; }
  // Passes, dtypes, "gqa", "value_dim", and of the options that not every backend has those that
  // this one has, under their public names.
  virtual std::vector<std::string> features() const = 0;

  virtual Support supports(const AttentionProblem& problem) const = 0;
  virtual void forward(const AttentionProblem& problem, const ForwardTensors& tensors) = 0;
  virtual void backward(const AttentionProblem& problem, const BackwardTensors& tensors) = 0;

  virtual CopyStats copy_stats(bool reset) = 0;
};

// Every backend of this build, in the order in which they are asked: metal, cpu.
const std::vector<Backend*>& backends();

// The backend that `name`, else FLASHATTN_BACKEND, asks for, else the first that supports the
// problem. Throws InvalidArgument for an unknown name, and Unsupported with each backend's reason.
Backend& choose_backend(const AttentionProblem& problem, const std::string& name);

}  // namespace flashattn
