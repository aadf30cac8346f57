// Puts kernels one after the other into a schedule and starts a new command buffer whenever one is
// full.
#pragma once

#include <cstdint>
#include <vector>

#include "core/visibility.h"
#include "flashattn/problem.h"
#include "metal/device_facts.h"
#include "metal/schedule.h"

namespace flashattn::metal {

class ScheduleBuilder {
 public:
  // `params` and `modifiers` are those of every dispatch, but for the threadgroups it takes; the
  // schedule takes the memory of `reused`.
  ScheduleBuilder(const DeviceFacts& facts, const abi::AttentionParams& params,
                  const abi::ModifierParams& modifiers, Schedule reused);

  // The rules of each batch entry, as the kernels read them; row shifts for ALiBi alone.
  void add_visibility(const std::vector<Visibility>& visibility, bool alibi);

  // Where each batch entry's rows lie, if the call is ragged.
  void add_entries(const AttentionProblem& problem, const AttentionInputs& inputs);

  // `total` threadgroups of one kernel, each worth `flops`, split where a command buffer is full.
  void add(const KernelKey& key, std::int64_t total, double flops);

  // `rows` rows of each of `heads` heads to a register kernel: the blocks that exist whole, then
  // the last one, or all of a ragged call, which check their rows.
  void add_rows(KernelKey key, std::int64_t rows, std::int64_t heads, double flops);

  // From here on entries of at most few_rows rows have their keys split into `chunks` chunks of
  // chunk_keys.
  void set_split(std::int64_t few_rows, int chunk_keys, std::int64_t chunks) {
    params_.few_rows = static_cast<std::uint32_t>(few_rows);
    params_.chunk_keys = static_cast<std::uint32_t>(chunk_keys);
    params_.chunks = static_cast<std::uint32_t>(chunks);
  }

  // dmask: `total` threadgroups, each adding up `tiles` tiles of scores worth `flops` each, in
  // dispatches that take so few of them that no threadgroup runs for long.
  void add_mask_gradient(const KernelKey& key, std::int64_t total, std::uint64_t tiles,
                         double flops);

  // Memory that one kernel leaves for another, in bytes.
  void add_scratch(abi::BufferSlot slot, std::int64_t bytes) {
    schedule_.scratch.push_back({slot, bytes});
  }

  Schedule take() { return std::move(schedule_); }

 private:
  void append(const KernelKey& key, std::int64_t first, std::int64_t count);

  Schedule schedule_;
  double max_flops_;
  abi::AttentionParams params_;
  abi::ModifierParams modifiers_;
  double flops_used_ = 0.0;
  int command_buffer_ = 0;
};

}  // namespace flashattn::metal
