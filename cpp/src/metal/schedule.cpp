// The schedule of each pass; see schedule.h.
#include "metal/schedule.h"

#include <algorithm>
#include <cassert>
#include <numbers>

#include "metal/tuning.h"

namespace flashattn::metal {

namespace {

constexpr int kDeltaRows = 8;  // rows, and so simdgroups, of one delta threadgroup: a guess
constexpr std::int64_t kMaxLength = std::int64_t{1} << 30;        // row intervals are 32-bit sums
constexpr std::int64_t kMaxThreadgroups = std::int64_t{1} << 32;  // a task number is 32 bits

abi::TensorStrides strides_of(const TensorView& view) {
  return {.batch = view.stride[0],
          .row = view.stride[1],
          .head = view.stride[2],
          .dim = view.stride[3]};
}

abi::ScalarStrides scalar_strides_of(const TensorView& view) {
  return {.batch = view.stride[0], .head = view.stride[1], .row = view.stride[2]};
}

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

std::int64_t blocks_of(std::int64_t length, int block) { return (length + block - 1) / block; }

abi::AttentionParams size_params(const AttentionProblem& problem) {
  abi::AttentionParams params{};
  params.query_heads = static_cast<std::uint32_t>(problem.query_heads);
  params.kv_heads = static_cast<std::uint32_t>(problem.kv_heads);
  params.heads_per_kv = static_cast<std::uint32_t>(problem.heads_per_kv());
  params.batch = static_cast<std::uint32_t>(problem.batch);
  params.seqlen_q = static_cast<std::uint32_t>(problem.seqlen_q);
  params.seqlen_k = static_cast<std::uint32_t>(problem.seqlen_k);
  params.head_dim = static_cast<std::uint32_t>(problem.head_dim);
  params.value_dim = static_cast<std::uint32_t>(problem.value_dim);
  params.scale = problem.scale;
  params.scale_log2e = problem.scale * std::numbers::log2e_v<float>;
  return params;
}

abi::AttentionParams input_params(const AttentionProblem& problem, const AttentionInputs& inputs) {
  abi::AttentionParams params = size_params(problem);
  params.query = strides_of(inputs.query);
  params.key = strides_of(inputs.key);
  params.value = strides_of(inputs.value);
  return params;
}

// Appends kernels in order and starts a new command buffer whenever one is full.
class ScheduleBuilder {
 public:
  ScheduleBuilder(const std::vector<Visibility>& visibility, const DeviceFacts& facts)
      : max_flops_(facts.max_flops_per_command_buffer) {
    for (const Visibility& entry : visibility) {
      schedule_.row_intervals.push_back(row_interval(entry));
    }
  }

  // `total` threadgroups of one kernel, each worth `flops`, split where a command buffer is full.
  void add(const KernelKey& key, std::int64_t total, double flops,
           const abi::AttentionParams& params, const std::vector<Binding>& bindings) {
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
      append(key, first, count, params, bindings);
      flops_used_ += static_cast<double>(count) * flops;
      first += count;
    }
  }

  Schedule take(std::int64_t delta_bytes) {
    schedule_.delta_bytes = delta_bytes;
    return std::move(schedule_);
  }

 private:
  void append(const KernelKey& key, std::int64_t first, std::int64_t count,
              abi::AttentionParams params, const std::vector<Binding>& bindings) {
    params.first_threadgroup = static_cast<std::uint32_t>(first);
    schedule_.dispatches.push_back({.key = key,
                                    .threadgroups = static_cast<std::uint32_t>(count),
                                    .threads_per_threadgroup = threads_per_threadgroup(key),
                                    .params = params,
                                    .bindings = bindings,
                                    .command_buffer = command_buffer_});
  }

  Schedule schedule_;
  double max_flops_;
  double flops_used_ = 0.0;
  int command_buffer_ = 0;
};

KernelKey product_key(KernelKind kind, const AttentionProblem& problem, const Geometry& geometry) {
  return {.kind = kind,
          .dtype = problem.dtype,
          .head_tile = geometry.head_tile,
          .value_tile = geometry.value_tile,
          .block_rows = geometry.block_rows,
          .block_columns = geometry.block_columns};
}

// Multiply-adds of one threadgroup, both counted, when it visits everything; an upper bound under a
// mask. `head_products` and `value_products`: matrix products of inner or outer size head_tile and
// value_tile.
double threadgroup_flops(const Geometry& geometry, std::int64_t visited, int head_products,
                         int value_products) {
  return 2.0 * geometry.block_rows * static_cast<double>(visited) *
         (head_products * geometry.head_tile + value_products * geometry.value_tile);
}

std::int64_t most_threadgroups(const AttentionProblem& problem) {
  const Geometry geometry = choose_geometry(problem, {});
  const int rows = std::min(geometry.block_rows, kDeltaRows);
  return std::max(problem.query_heads * blocks_of(problem.seqlen_q, rows),
                  problem.kv_heads * blocks_of(problem.seqlen_k, geometry.block_rows)) *
         problem.batch;
}

}  // namespace

Support supports(const AttentionProblem& problem, const DeviceFacts& facts) {
  const auto no = [](std::string reason) {
    return Support{.ok = false, .reason = std::move(reason)};
  };
  const auto missing = [&](const char* option) {
    return no(std::string(option) + " is not implemented yet by the metal backend");
  };
  if (facts.apple_family < 7) return no("simdgroup matrices need Apple GPU family 7 (M1) or later");
  if (problem.packed) return missing("attention_varlen");
  if (problem.page_size != 0) return missing("block_table");
  if (problem.kv_starts) return missing("leftpad");
  if (problem.kv_batch_index) return missing("cache_batch_idx");
  if (problem.softcap != 0.0F) return missing("softcap");
  if (problem.mask != MaskKind::kNone) return missing("mask");
  if (problem.alibi) return missing("alibi_slopes");
  if (problem.sinks) return missing("sinks");
  if (problem.dropout.probability != 0.0) return missing("dropout_p");
  if (problem.head_dim > kMaxTile || problem.value_dim > kMaxTile) {
    return no("head_dim and value_dim must be at most 256 on the metal backend");
  }
  if (problem.seqlen_q >= kMaxLength || problem.seqlen_k >= kMaxLength) {
    return no("sequences must be shorter than 2^30 on the metal backend");
  }
  if (most_threadgroups(problem) >= kMaxThreadgroups) {
    return no("the problem has more than 2^32 blocks of rows");
  }
  return {.ok = true, .reason = {}};
}

Schedule schedule_forward(const AttentionProblem& problem, const ForwardTensors& tensors,
                          const std::vector<Visibility>& visibility, const DeviceFacts& facts) {
  assert(std::ssize(visibility) == problem.batch);
  const Geometry geometry = choose_geometry(problem, facts);
  abi::AttentionParams params = input_params(problem, tensors.inputs);
  params.out = strides_of(tensors.out);
  params.lse = scalar_strides_of(tensors.lse);
  ScheduleBuilder builder(visibility, facts);
  builder.add(
      product_key(KernelKind::kForward, problem, geometry),
      problem.batch * problem.query_heads * blocks_of(problem.seqlen_q, geometry.block_rows),
      threadgroup_flops(geometry, problem.seqlen_k + geometry.block_columns, 1, 1), params,
      {{abi::kBufferQuery},
       {abi::kBufferKey},
       {abi::kBufferValue},
       {abi::kBufferOut, true},
       {abi::kBufferLse, true},
       {abi::kBufferRowIntervals}});
  return builder.take(0);
}

Schedule schedule_backward(const AttentionProblem& problem, const BackwardTensors& tensors,
                           const std::vector<Visibility>& visibility, const DeviceFacts& facts) {
  assert(std::ssize(visibility) == problem.batch);
  const Geometry geometry = choose_geometry(problem, facts);
  abi::AttentionParams params = input_params(problem, tensors.inputs);
  params.out = strides_of(tensors.out);
  params.lse = scalar_strides_of(tensors.lse);
  params.dout = strides_of(tensors.dout);
  params.dq = strides_of(tensors.dq);
  params.dk = strides_of(tensors.dk);
  params.dv = strides_of(tensors.dv);
  if (tensors.dlse) params.dlse = scalar_strides_of(tensors.dlse);

  ScheduleBuilder builder(visibility, facts);
  const std::int64_t heads = problem.batch * problem.query_heads;
  std::vector<Binding> delta_bindings = {
      {abi::kBufferOut}, {abi::kBufferDout}, {abi::kBufferDelta, true}};
  if (tensors.dlse) delta_bindings.push_back({abi::kBufferDlse});
  builder.add({.kind = KernelKind::kDelta,
               .dtype = problem.dtype,
               .block_rows = kDeltaRows,
               .has_dlse = static_cast<bool>(tensors.dlse)},
              heads * blocks_of(problem.seqlen_q, kDeltaRows),
              2.0 * kDeltaRows * static_cast<double>(problem.value_dim), params, delta_bindings);

  const std::int64_t keys = problem.seqlen_k + geometry.block_columns;
  builder.add(product_key(KernelKind::kBackwardDq, problem, geometry),
              heads * blocks_of(problem.seqlen_q, geometry.block_rows),
              threadgroup_flops(geometry, keys, 2, 1), params,
              {{abi::kBufferQuery},
               {abi::kBufferKey},
               {abi::kBufferValue},
               {abi::kBufferLse},
               {abi::kBufferDout},
               {abi::kBufferDelta},
               {abi::kBufferDq, true},
               {abi::kBufferRowIntervals}});

  const std::int64_t key_blocks =
      problem.batch * problem.kv_heads * blocks_of(problem.seqlen_k, geometry.block_rows);
  const std::int64_t rows = (problem.seqlen_q + geometry.block_columns) * problem.heads_per_kv();
  builder.add(product_key(KernelKind::kBackwardDv, problem, geometry), key_blocks,
              threadgroup_flops(geometry, rows, 1, 1), params,
              {{abi::kBufferQuery},
               {abi::kBufferKey},
               {abi::kBufferLse},
               {abi::kBufferDout},
               {abi::kBufferDv, true},
               {abi::kBufferRowIntervals}});
  builder.add(product_key(KernelKind::kBackwardDk, problem, geometry), key_blocks,
              threadgroup_flops(geometry, rows, 2, 1), params,
              {{abi::kBufferQuery},
               {abi::kBufferKey},
               {abi::kBufferValue},
               {abi::kBufferLse},
               {abi::kBufferDout},
               {abi::kBufferDelta},
               {abi::kBufferDk, true},
               {abi::kBufferRowIntervals}});
  return builder.take(heads * problem.seqlen_q * std::int64_t{sizeof(float)});
}

}  // namespace flashattn::metal
