// Splitting work over dispatches and command buffers; see schedule_builder.h.
#include "metal/schedule_builder.h"

#include <algorithm>
#include <utility>

#include "core/make_visibility.h"
#include "metal/tuning.h"

namespace flashattn::metal {

namespace {

abi::RowInterval row_interval(const Visibility& visibility) {
  // Offsets past +-2^30 decide the same as +-2^30 for every length below 2^30.
  const auto clamped = [](std::int64_t offset) {
    return static_cast<std::int32_t>(std::clamp(offset, -kMaxLength, kMaxLength));
  };
  return {.begin_offset = clamped(visibility.shift - visibility.left),
          .end_offset = clamped(visibility.shift + visibility.right + 1),
          .key_limit = static_cast<std::int32_t>(visibility.key_limit),
          .unused = 0};
}

}  // namespace

ScheduleBuilder::ScheduleBuilder(const DeviceFacts& facts, const abi::AttentionParams& params,
                                 const abi::ModifierParams& modifiers, Schedule reused)
    : schedule_(std::move(reused)),
      max_flops_(facts.max_flops_per_command_buffer),
      params_(params),
      modifiers_(modifiers) {
  schedule_.dispatches.clear();
  schedule_.row_intervals.clear();
  schedule_.row_shifts.clear();
  schedule_.entries.clear();
  schedule_.block_table.clear();
  schedule_.scratch.clear();
}

void ScheduleBuilder::add_visibility(const std::vector<Visibility>& visibility, bool alibi) {
  for (const Visibility& entry : visibility) {
    schedule_.row_intervals.push_back(row_interval(entry));
    if (alibi) schedule_.row_shifts.push_back(entry.shift);
  }
}

void ScheduleBuilder::add_entries(const AttentionProblem& problem, const AttentionInputs& inputs) {
  const auto narrow = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
  const std::int64_t pages = problem.page_size == 0 ? 0 : inputs.block_table.shape[1];
  for (std::int64_t b = 0; problem.ragged() && b < problem.batch; ++b) {
    const Entry entry = make_entry(problem, inputs, b);
    schedule_.entries.push_back({.query_batch = narrow(entry.query.batch),
                                 .query_row = narrow(entry.query.row),
                                 .key_batch = narrow(entry.key.batch),
                                 .key_row = narrow(entry.key.row),
                                 .seqlen_q = narrow(entry.seqlen_q),
                                 .seqlen_k = narrow(entry.seqlen_k),
                                 .first_page = narrow(entry.key.batch * pages),
                                 .page_rows = narrow(problem.page_size)});
  }
  for (std::int64_t b = 0; pages != 0 && b < problem.batch; ++b) {
    // Numbers past an entry's last page may be anything; no kernel reads them.
    for (std::int64_t page = 0; page < pages; ++page) {
      schedule_.block_table.push_back(narrow(read_integer(inputs.block_table, b, page)));
    }
  }
  // A table without a column is bound too.
  if (problem.page_size != 0) schedule_.block_table.push_back(0);
}

void ScheduleBuilder::add(const KernelKey& key, std::int64_t total, double flops) {
  std::int64_t first = 0;
  while (first < total) {
    const double room = std::max(0.0, max_flops_ - flops_used_);
    const auto fitting = static_cast<std::int64_t>(std::min(room / flops, 1e18));
    if (fitting == 0 && flops_used_ > 0.0) {
      ++command_buffer_;
      flops_used_ = 0.0;
      continue;
    }
    // One threadgroup that fills a command buffer by itself cannot be split further.
    const std::int64_t count = std::min(total - first, std::max<std::int64_t>(fitting, 1));
    append(key, first, count);
    flops_used_ += static_cast<double>(count) * flops;
    first += count;
  }
}

void ScheduleBuilder::add_rows(KernelKey key, std::int64_t rows, std::int64_t heads, double flops) {
  const std::int64_t blocks = (rows + key.block_rows - 1) / key.block_rows;
  // Entries of a ragged call end anywhere.
  const std::int64_t whole = key.ragged ? 0 : rows / key.block_rows;
  const auto add_blocks = [&](std::int64_t first, std::int64_t count, bool full) {
    if (count == 0) return;
    params_.first_block = static_cast<std::uint32_t>(first);
    params_.blocks = static_cast<std::uint32_t>(count);
    key.registers.full_rows = full;
    add(key, count * heads, flops);
  };
  add_blocks(0, whole, true);
  add_blocks(whole, blocks - whole, false);
  params_.first_block = params_.blocks = 0;
}

void ScheduleBuilder::add_mask_gradient(const KernelKey& key, std::int64_t total,
                                        std::uint64_t tiles, double flops) {
  // A threadgroup has one core to itself, so its share of what a command buffer may carry is small:
  // a guess.
  constexpr double kShare = 1.0 / 64;
  const auto most = static_cast<std::uint64_t>(std::clamp(max_flops_ * kShare / flops, 1.0, 1e9));
  for (std::uint64_t first = 0; first < tiles; first += most) {
    const std::uint64_t count = std::min(most, tiles - first);
    modifiers_.first_tile = first;
    modifiers_.tile_count = static_cast<std::uint32_t>(count);
    add(key, total, flops * static_cast<double>(count));
  }
}

void ScheduleBuilder::append(const KernelKey& key, std::int64_t first, std::int64_t count) {
  params_.first_threadgroup = static_cast<std::uint32_t>(first);
  schedule_.dispatches.push_back({.key = key,
                                  .threadgroups = static_cast<std::uint32_t>(count),
                                  .threads_per_threadgroup = threads_per_threadgroup(key),
                                  .params = params_,
                                  .modifiers = modifiers_,
                                  .command_buffer = command_buffer_});
}

}  // namespace flashattn::metal
