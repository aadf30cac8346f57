// Schedule: a validated problem becomes a list of Dispatch values, the last thing that is plain
// C++20. The device half only looks pipelines up, binds buffers and encodes. Golden texts of it are
// tested everywhere.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/visibility.h"
#include "flashattn/backend.h"
#include "metal/device_facts.h"
#include "metal/kernel_key.h"
#include "shaders/abi.h"

namespace flashattn::metal {

// One grid of threadgroups of one kernel, which uses the buffers that bindings(key) tells.
struct Dispatch {
  KernelKey key;
  std::uint32_t threadgroups = 0;
  int threads_per_threadgroup = 0;
  abi::AttentionParams params{};
  abi::ModifierParams modifiers{};
  int command_buffer = 0;  // dispatches of equal number go into one; the numbers rise
};

// Memory that kernels share and the call does not have.
struct Scratch {
  abi::BufferSlot slot = abi::kBufferDelta;
  std::int64_t bytes = 0;
};

struct Schedule {
  std::vector<Dispatch> dispatches;
  std::vector<abi::RowInterval> row_intervals;  // [batch]
  std::vector<std::int64_t> row_shifts;         // [batch], with ALiBi
  std::vector<abi::EntryRows> entries;          // [batch], of a ragged call
  std::vector<std::uint32_t> block_table;       // [batch][max_pages], of a paged one
  std::vector<Scratch> scratch;
};

// Whether the kernels can do the problem on such a device, and the first reason why not.
Support supports(const AttentionProblem& problem, const DeviceFacts& facts);

// Whether a kernel of the schedule may leave something in the status word.
bool has_status(const Schedule& schedule);

// What the kernels of a schedule are chosen by.
struct KernelChoice {
  const DeviceFacts& facts;
  // Register kernels keep values that are not finite from rows that may not see them, instead of
  // telling of them in the status word.
  bool selects = false;
};

// The passes. Only shapes and strides are read from the tensors, and the values of the integer
// arrays that say where entries lie; `visibility` has one entry per batch entry. The problem is
// supported and neither batch, query_heads nor seqlen_q is 0. Backward writes the gradients that
// are given, but with seqlen_k 0 only dsinks: the others are 0 or empty. `reused`: an older
// schedule, whose memory the new one takes.
Schedule schedule_forward(const AttentionProblem& problem, const ForwardTensors& tensors,
                          const std::vector<Visibility>& visibility, const KernelChoice& choice,
                          Schedule reused = {});
Schedule schedule_backward(const AttentionProblem& problem, const BackwardTensors& tensors,
                           const std::vector<Visibility>& visibility, const KernelChoice& choice,
                           Schedule reused = {});

// One line per dispatch, for golden tests and logs.
std::string to_string(const Schedule& schedule);

}  // namespace flashattn::metal
