// The schedule of each pass; see schedule.h.
#include "metal/schedule.h"

#include <cassert>
#include <numbers>

#include "metal/schedule_builder.h"
#include "metal/schedule_options.h"
#include "metal/schedule_tensors.h"
#include "metal/tuning.h"

namespace flashattn::metal {

namespace {

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
  params.table_rows =
      static_cast<std::uint32_t>(problem.packed ? problem.total_q : problem.seqlen_q);
  return params;
}

template <typename Tensors>
abi::AttentionParams call_params(const AttentionProblem& problem, const Tensors& tensors) {
  abi::AttentionParams params = size_params(problem);
  Tensors views = tensors;
  set_strides(call_tensors(views), &params);
  return params;
}

KernelKey product_key(KernelKind kind, const AttentionProblem& problem, const Geometry& geometry) {
  return {.kind = kind,
          .dtype = problem.dtype,
          .head_tile = geometry.head_tile,
          .value_tile = geometry.value_tile,
          .block_rows = geometry.block_rows,
          .block_columns = geometry.block_columns,
          .ragged = problem.ragged() && kind != KernelKind::kMaskGradient,
          .paged = problem.page_size != 0,
          .options = kernel_options(kind, problem)};
}

// Multiply-adds of one threadgroup, both counted, when it visits everything; an upper bound under a
// mask. `head_products` and `value_products`: matrix products of inner or outer size head_tile and
// value_tile.
double threadgroup_flops(const Geometry& geometry, std::int64_t visited, int head_products,
                         int value_products) {
  return 2.0 * geometry.block_rows * static_cast<double>(visited) *
         (head_products * geometry.head_tile + value_products * geometry.value_tile);
}

// dq where nobody wants it: its kernel also computes what dalibi_slopes is a sum of.
TensorView scratch_dq(const AttentionProblem& problem) {
  const std::int64_t rows = problem.packed ? problem.total_q : problem.seqlen_q;
  return contiguous_view(nullptr, problem.dtype, problem.packed ? 1 : problem.batch, rows,
                         problem.query_heads, problem.head_dim);
}

std::int64_t contiguous_bytes(const TensorView& view) {
  return view.shape[0] * view.stride[0] * static_cast<std::int64_t>(item_size(view.dtype));
}

// The passes over the query side and the key side.
void add_products(const AttentionProblem& problem, const BackwardTensors& tensors,
                  const Geometry& geometry, ScheduleBuilder* builder) {
  const std::int64_t query_blocks =
      problem.batch * problem.query_heads * blocks_of(problem.seqlen_q, geometry.block_rows);
  const std::int64_t key_blocks =
      problem.batch * problem.kv_heads * blocks_of(problem.seqlen_k, geometry.block_rows);
  const std::int64_t keys = problem.seqlen_k + geometry.block_columns;
  const std::int64_t rows = (problem.seqlen_q + geometry.block_columns) * problem.heads_per_kv();
  if (tensors.dq) {
    KernelKey key = product_key(KernelKind::kBackwardDq, problem, geometry);
    key.options.slope_gradient = static_cast<bool>(tensors.dalibi_slopes);
    builder->add(key, query_blocks, threadgroup_flops(geometry, keys, 2, 1));
  }
  if (tensors.dv) {
    builder->add(product_key(KernelKind::kBackwardDv, problem, geometry), key_blocks,
                 threadgroup_flops(geometry, rows, 1, 1));
  }
  if (tensors.dk) {
    builder->add(product_key(KernelKind::kBackwardDk, problem, geometry), key_blocks,
                 threadgroup_flops(geometry, rows, 2, 1));
  }
}

// dmask: a threadgroup per tile of the mask, which is added to one tile of scores, or to all of
// them along an axis that the mask is broadcast over.
void add_mask_gradient(const AttentionProblem& problem, const Geometry& geometry,
                       ScheduleBuilder* builder) {
  const auto& mask = problem.mask_shape;
  const std::int64_t row_blocks = blocks_of(problem.seqlen_q, geometry.block_rows);
  const std::int64_t key_blocks = blocks_of(problem.seqlen_k, geometry.block_columns);
  const std::int64_t total = mask[0] * mask[1] * blocks_of(mask[2], geometry.block_rows) *
                             blocks_of(mask[3], geometry.block_columns);
  const std::int64_t tiles = (mask[0] == 1 ? problem.batch : 1) *
                             (mask[1] == 1 ? problem.query_heads : 1) *
                             (mask[2] == 1 ? row_blocks : 1) * (mask[3] == 1 ? key_blocks : 1);
  builder->add_mask_gradient(product_key(KernelKind::kMaskGradient, problem, geometry), total,
                             static_cast<std::uint64_t>(tiles),
                             threadgroup_flops(geometry, geometry.block_columns, 1, 1));
}

// dalibi_slopes and dsinks: sums over the rows of each head.
void add_sum(KernelKind kind, const AttentionProblem& problem, std::int64_t sums,
             ScheduleBuilder* builder) {
  const std::int64_t rows = problem.batch * problem.query_heads * problem.seqlen_q;
  builder->add({.kind = kind, .block_rows = kSumHeads, .ragged = problem.ragged()},
               blocks_of(sums, kSumHeads),
               2.0 * static_cast<double>(rows) / static_cast<double>(sums) * kSumHeads);
}

}  // namespace

Schedule schedule_forward(const AttentionProblem& problem, const ForwardTensors& tensors,
                          const std::vector<Visibility>& visibility, const DeviceFacts& facts) {
  assert(std::ssize(visibility) == problem.batch);
  const Geometry geometry = choose_geometry(problem, facts);
  const AttentionInputs& in = tensors.inputs;
  ScheduleBuilder builder(
      facts, call_params(problem, tensors),
      modifier_params(problem,
                      {.mask = in.mask, .alibi_slopes = in.alibi_slopes, .sinks = in.sinks}));
  builder.add_visibility(visibility, problem.alibi);
  builder.add_entries(problem, in);
  builder.add(
      product_key(KernelKind::kForward, problem, geometry),
      problem.batch * problem.query_heads * blocks_of(problem.seqlen_q, geometry.block_rows),
      threadgroup_flops(geometry, problem.seqlen_k + geometry.block_columns, 1, 1));
  return builder.take();
}

Schedule schedule_backward(const AttentionProblem& problem, const BackwardTensors& given,
                           const std::vector<Visibility>& visibility, const DeviceFacts& facts) {
  assert(std::ssize(visibility) == problem.batch);
  const Geometry geometry = choose_geometry(problem, facts);
  BackwardTensors tensors = given;
  if (!given.dq && given.dalibi_slopes) tensors.dq = scratch_dq(problem);
  const AttentionInputs& in = tensors.inputs;
  ScheduleBuilder builder(facts, call_params(problem, tensors),
                          modifier_params(problem, {.mask = in.mask,
                                                    .alibi_slopes = in.alibi_slopes,
                                                    .sinks = in.sinks,
                                                    .dmask = tensors.dmask,
                                                    .dalibi_slopes = tensors.dalibi_slopes,
                                                    .dsinks = tensors.dsinks}));
  builder.add_visibility(visibility, problem.alibi);
  builder.add_entries(problem, in);
  const std::int64_t heads = problem.batch * problem.query_heads;
  const std::int64_t rows =
      problem.packed ? problem.query_heads * problem.total_q : heads * problem.seqlen_q;
  const std::int64_t row_bytes = rows * std::int64_t{sizeof(float)};
  builder.add_scratch(abi::kBufferDelta, row_bytes);
  builder.add({.kind = KernelKind::kDelta,
               .dtype = problem.dtype,
               .block_rows = kDeltaRows,
               .has_dlse = static_cast<bool>(tensors.dlse),
               .ragged = problem.ragged()},
              heads * blocks_of(problem.seqlen_q, kDeltaRows),
              2.0 * kDeltaRows * static_cast<double>(problem.value_dim));
  if (tensors.dsinks) {
    add_sum(KernelKind::kSinkGradient, problem, problem.query_heads, &builder);
  }
  if (problem.seqlen_k == 0) return builder.take();

  if (tensors.dalibi_slopes) builder.add_scratch(abi::kBufferSlopeRows, row_bytes);
  if (tensors.dq && !given.dq) builder.add_scratch(abi::kBufferDq, contiguous_bytes(tensors.dq));
  add_products(problem, tensors, geometry, &builder);
  if (tensors.dalibi_slopes) {
    const bool per_batch = in.alibi_slopes.rank == 2;
    add_sum(KernelKind::kSlopeGradient, problem, per_batch ? heads : problem.query_heads, &builder);
  }
  if (tensors.dmask) add_mask_gradient(problem, geometry, &builder);
  return builder.take();
}

}  // namespace flashattn::metal
