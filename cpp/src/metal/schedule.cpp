// The schedule of each pass; see schedule.h.
#include "metal/schedule.h"

#include <algorithm>
#include <cassert>
#include <numbers>
#include <optional>
#include <utility>

#include "core/make_visibility.h"
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
  params.max_slack = kMaxSlack;
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

// Whether register kernels may read the tensor's rows four elements at a time, with offsets inside
// a block of rows in 32 bits.
bool has_vector_rows(const TensorView& view) {
  constexpr std::int64_t kLongestRow = std::int64_t{1} << 23;
  return view.shape[3] % 4 == 0 && view.stride[3] == 1 && view.stride[1] > 0 &&
         view.stride[1] < kLongestRow;
}

// One matrix product pass: its kernel, and what a score costs in products of the tiles' sizes.
struct ProductPass {
  KernelKind kind;
  int head_products;
  int value_products;
};

// What the passes of one call share.
struct CallPasses {
  const AttentionProblem& problem;
  const KernelChoice& choice;
  Geometry geometry;
  bool vector_rows;

  std::optional<KernelKey> register_key(KernelKind kind, std::int64_t rows) const {
    return with_facts(choose_register(product_key(kind, problem, geometry), rows, choice.facts));
  }

  std::optional<KernelKey> split_key() const {
    return with_facts(choose_split(product_key(KernelKind::kForward, problem, geometry),
                                   problem.heads_per_kv(), choice.facts));
  }

  // A register kernel, and what the call lets it leave out.
  std::optional<KernelKey> with_facts(std::optional<KernelKey> key) const {
    if (!key) return key;
    key->registers.vector_rows = vector_rows;
    key->registers.exact_tiles =
        problem.head_dim == geometry.head_tile && problem.value_dim == geometry.value_tile;
    key->registers.selects = choice.selects;
    return key;
  }
};

// Adds a pass, by a register kernel where there is one. Keys are the own rows of dv and dk.
void add_pass(const CallPasses& call, const ProductPass& pass, bool slope_gradient,
              ScheduleBuilder* builder) {
  const AttentionProblem& problem = call.problem;
  const bool key_side = pass.kind != KernelKind::kForward && pass.kind != KernelKind::kBackwardDq;
  const std::int64_t rows = key_side ? problem.seqlen_k : problem.seqlen_q;
  const std::int64_t heads = problem.batch * (key_side ? problem.kv_heads : problem.query_heads);
  const auto flops = [&](const KernelKey& key) {
    const std::int64_t visited =
        key_side ? (problem.seqlen_q + key.block_columns) * problem.heads_per_kv()
                 : problem.seqlen_k + key.block_columns;
    const Geometry geometry{.head_tile = key.head_tile,
                            .value_tile = key.value_tile,
                            .block_rows = key.block_rows,
                            .block_columns = key.block_columns};
    return threadgroup_flops(geometry, visited, pass.head_products, pass.value_products);
  };
  if (std::optional<KernelKey> key = call.register_key(pass.kind, rows)) {
    key->options.slope_gradient = slope_gradient;
    builder->add_rows(*key, rows, heads, flops(*key));
    return;
  }
  KernelKey key = product_key(pass.kind, problem, call.geometry);
  key.options.slope_gradient = slope_gradient;
  builder->add(key, heads * blocks_of(rows, key.block_rows), flops(key));
}

// Forward for entries of few rows and many keys: chunks of keys side by side, then their merging.
// Returns whether entries are left for the kernel that takes all keys of a row.
bool add_split(const CallPasses& call, const AttentionInputs& in,
               const std::vector<Visibility>& visibility, ScheduleBuilder* builder) {
  const AttentionProblem& problem = call.problem;
  std::int64_t keys = 0;  // of the longest entry: a cache may be far longer
  for (const Visibility& entry : visibility) keys = std::max(keys, entry.key_limit);
  // A chunk alone has the bits of a call that is not split, so only longer ones are.
  const std::int64_t chunks = blocks_of(keys, kChunkKeys);
  if (chunks < 2) return true;
  std::int64_t few = 0;  // rows of the tallest entry that is split
  bool others = false;
  const std::int64_t heights = problem.packed ? problem.batch : 1;  // else all are the same
  for (std::int64_t b = 0; b < heights; ++b) {
    const std::int64_t rows =
        problem.packed ? make_entry(problem, in, b).seqlen_q : problem.seqlen_q;
    if (rows > kFewRows) others = true;
    if (rows <= kFewRows) few = std::max(few, rows);
  }
  const std::optional<KernelKey> key = call.split_key();
  if (few == 0 || !key) return true;
  const std::int64_t parts = problem.batch * problem.query_heads * few * chunks;
  constexpr std::int64_t kFloat = sizeof(float);
  const std::int64_t part_bytes = parts * std::max<std::int64_t>(problem.value_dim, 2) * kFloat;
  const std::int64_t most = call.choice.facts.max_buffer_length;
  if (most != 0 && part_bytes > most) return true;  // 0: not known
  builder->set_split(few, kChunkKeys, chunks);
  builder->add_scratch(abi::kBufferPartialOut, parts * problem.value_dim * kFloat);
  builder->add_scratch(abi::kBufferPartialState, parts * 2 * kFloat);
  const std::int64_t groups =
      blocks_of(problem.heads_per_kv(), static_cast<int>(key->registers.simdgroups));
  builder->add(*key, chunks * problem.batch * problem.kv_heads * groups,
               2.0 * key->block_rows * kChunkKeys * (key->head_tile + key->value_tile));
  builder->add({.kind = KernelKind::kMergeChunks,
                .dtype = problem.dtype,
                .block_rows = kFewRows,
                .ragged = problem.ragged(),
                .options = kernel_options(KernelKind::kForward, problem)},
               problem.batch * problem.query_heads,
               2.0 * kFewRows * static_cast<double>(chunks * problem.value_dim));
  return others;
}

// The passes over the query side and the key side.
void add_products(const CallPasses& call, const BackwardTensors& tensors,
                  ScheduleBuilder* builder) {
  const Geometry& geometry = call.geometry;
  if (tensors.dq) {
    add_pass(call, {KernelKind::kBackwardDq, 2, 1}, static_cast<bool>(tensors.dalibi_slopes),
             builder);
  }
  const bool fused = tensors.dk && tensors.dv &&
                     fuses_dkv(geometry.head_tile, geometry.value_tile) &&
                     call.register_key(KernelKind::kBackwardDkv, call.problem.seqlen_k);
  if (fused) {
    add_pass(call, {KernelKind::kBackwardDkv, 2, 2}, false, builder);
    return;
  }
  if (tensors.dv) add_pass(call, {KernelKind::kBackwardDv, 1, 1}, false, builder);
  if (tensors.dk) add_pass(call, {KernelKind::kBackwardDk, 2, 1}, false, builder);
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

bool has_status(const Schedule& schedule) {
  return std::any_of(
      schedule.dispatches.begin(), schedule.dispatches.end(),
      [](const Dispatch& dispatch) { return static_cast<bool>(dispatch.key.registers); });
}

Schedule schedule_forward(const AttentionProblem& problem, const ForwardTensors& tensors,
                          const std::vector<Visibility>& visibility, const KernelChoice& choice,
                          Schedule reused) {
  assert(std::ssize(visibility) == problem.batch);
  const AttentionInputs& in = tensors.inputs;
  const CallPasses call{.problem = problem,
                        .choice = choice,
                        .geometry = choose_geometry(problem, choice.facts),
                        .vector_rows = has_vector_rows(in.query) && has_vector_rows(in.key) &&
                                       has_vector_rows(in.value)};
  ScheduleBuilder builder(
      choice.facts, call_params(problem, tensors),
      modifier_params(problem,
                      {.mask = in.mask, .alibi_slopes = in.alibi_slopes, .sinks = in.sinks}),
      std::move(reused));
  builder.add_visibility(visibility, problem.alibi);
  builder.add_entries(problem, in);
  if (add_split(call, in, visibility, &builder)) {
    add_pass(call, {KernelKind::kForward, 1, 1}, false, &builder);
  }
  return builder.take();
}

Schedule schedule_backward(const AttentionProblem& problem, const BackwardTensors& given,
                           const std::vector<Visibility>& visibility, const KernelChoice& choice,
                           Schedule reused) {
  assert(std::ssize(visibility) == problem.batch);
  const Geometry geometry = choose_geometry(problem, choice.facts);
  BackwardTensors tensors = given;
  if (!given.dq && given.dalibi_slopes) tensors.dq = scratch_dq(problem);
  const AttentionInputs& in = tensors.inputs;
  ScheduleBuilder builder(choice.facts, call_params(problem, tensors),
                          modifier_params(problem, {.mask = in.mask,
                                                    .alibi_slopes = in.alibi_slopes,
                                                    .sinks = in.sinks,
                                                    .dmask = tensors.dmask,
                                                    .dalibi_slopes = tensors.dalibi_slopes,
                                                    .dsinks = tensors.dsinks}),
                          std::move(reused));
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
  const CallPasses call{.problem = problem,
                        .choice = choice,
                        .geometry = geometry,
                        .vector_rows = has_vector_rows(in.query) && has_vector_rows(in.key) &&
                                       has_vector_rows(in.value) && has_vector_rows(tensors.dout)};
  add_products(call, tensors, &builder);
  if (tensors.dalibi_slopes) {
    const bool per_batch = in.alibi_slopes.rank == 2;
    add_sum(KernelKind::kSlopeGradient, problem, per_batch ? heads : problem.query_heads, &builder);
  }
  if (tensors.dmask) add_mask_gradient(problem, geometry, &builder);
  return builder.take();
}

}  // namespace flashattn::metal
