// Views to jobs, the problems without work, and what this backend cannot do yet.
#include "cpu/cpu_backend.h"

#include <array>
#include <cstdint>
#include <limits>

#include "core/make_dropout.h"
#include "core/make_visibility.h"
#include "core/pending.h"
#include "core/registry.h"
#include "cpu/backward_schedule.h"
#include "cpu/decode_schedule.h"
#include "cpu/dispatch.h"
#include "cpu/forward_schedule.h"
#include "cpu/interruption.h"
#include "cpu/job.h"
#include "cpu/processor_name.h"
#include "cpu/thread_pool.h"

namespace flashattn::cpu {
namespace {

// A stride on an axis of size 1 means nothing; 0 there keeps it out of all sums.
std::int64_t stride_of(const TensorView& view, std::size_t axis) {
  return view.shape[axis] == 1 ? 0 : view.stride[axis];
}

// (batch, seqlen, heads, dim)
RowTensor row_tensor(const TensorView& view) {
  if (!view) return {};
  return {.data = view.data,
          .batch_stride = stride_of(view, 0),
          .head_stride = stride_of(view, 2),
          .row_stride = stride_of(view, 1),
          .dim_stride = view.shape[3] == 1 ? 1 : view.stride[3]};
}

// (batch, heads, seqlen_q)
RowScalars row_scalars(const TensorView& view) {
  if (!view) return {};
  return {.data = static_cast<float*>(view.data),
          .batch_stride = stride_of(view, 0),
          .head_stride = stride_of(view, 1),
          .row_stride = stride_of(view, 2)};
}

// (batch, heads), or (heads) with one value for all batch entries.
HeadScalars head_scalars(const TensorView& view) {
  if (!view) return {};
  const auto heads = static_cast<std::size_t>(view.rank) - 1;
  return {.data = static_cast<const float*>(view.data),
          .batch_stride = heads == 0 ? 0 : stride_of(view, 0),
          .head_stride = stride_of(view, heads)};
}

HeadGradients head_gradients(const TensorView& view) {
  const HeadScalars places = head_scalars(view);
  return {.data = static_cast<float*>(view.data),
          .per_batch = view.rank == 2,
          .batch_stride = places.batch_stride,
          .head_stride = places.head_stride};
}

// A view of up to four axes that broadcasts to (batch, query heads, seqlen_q, seqlen_k).
MaskGradient mask_gradient(const TensorView& view) {
  if (!view) return {};
  std::array<std::int64_t, 4> size{1, 1, 1, 1};
  std::array<std::int64_t, 4> stride{};
  const std::size_t first = 4 - static_cast<std::size_t>(view.rank);
  for (std::size_t axis = first; axis < 4; ++axis) {
    size[axis] = view.shape[axis - first];
    stride[axis] = stride_of(view, axis - first);
  }
  return {.data = view.data,
          .dtype = view.dtype,
          .batches = size[0],
          .heads = size[1],
          .rows = size[2],
          .keys = size[3],
          .batch_stride = stride[0],
          .head_stride = stride[1],
          .row_stride = stride[2],
          .key_stride = stride[3]};
}

// What the host works out about the entries of a call; outlives the job that points at it.
struct EntryTables {
  EntryTables(const AttentionProblem& problem, const AttentionInputs& inputs)
      : visibility(make_visibilities(problem, inputs)), entries(make_entries(problem, inputs)) {}

  RowPlaces places(bool of_keys) const {
    return {.entries = entries.empty() ? nullptr : entries.data(), .of_keys = of_keys};
  }

  std::vector<Visibility> visibility;
  std::vector<Entry> entries;  // empty: the call is not ragged
};

RowTensor query_rows(const TensorView& view, const EntryTables& tables) {
  RowTensor rows = row_tensor(view);
  rows.places = tables.places(false);
  return rows;
}

RowTensor key_rows(const TensorView& view, const EntryTables& tables) {
  RowTensor rows = row_tensor(view);
  rows.places = tables.places(true);
  return rows;
}

RowScalars query_scalars(const TensorView& view, const EntryTables& tables) {
  RowScalars scalars = row_scalars(view);
  scalars.places = tables.places(false);
  return scalars;
}

// Of key or value: the block table, [batch][max_pages] int64 since PerBatchValues.
void set_pages(const AttentionProblem& problem, const AttentionInputs& inputs, RowTensor& rows) {
  if (problem.page_size == 0) return;
  rows.pages = static_cast<const std::int64_t*>(inputs.block_table.data);
  rows.pages_stride = inputs.block_table.shape[1];
  rows.page_rows = problem.page_size;
}

AttentionJob job_of(const AttentionProblem& problem, const AttentionInputs& inputs,
                    const EntryTables& tables) {
  AttentionJob job;
  job.dtype = problem.dtype;
  job.batch = problem.batch;
  job.query_heads = problem.query_heads;
  job.kv_heads = problem.kv_heads;
  job.heads_per_kv = problem.heads_per_kv();
  job.seqlen_q = problem.seqlen_q;
  job.seqlen_k = problem.seqlen_k;
  job.head_dim = problem.head_dim;
  job.value_dim = problem.value_dim;
  job.scale = problem.scale;
  job.visibility = tables.visibility.data();
  job.entries = tables.places(false).entries;
  job.query = query_rows(inputs.query, tables);
  job.key = key_rows(inputs.key, tables);
  job.value = key_rows(inputs.value, tables);
  set_pages(problem, inputs, job.key);
  set_pages(problem, inputs, job.value);
  job.softcap = problem.softcap;
  job.slopes = head_scalars(inputs.alibi_slopes);
  job.sinks = head_scalars(inputs.sinks);
  job.mask = score_mask_of(inputs.mask);
  job.dropout = make_dropout_rule(problem);
  return job;
}

// Calls item(offset in elements) for every element of a view.
template <class Item>
void for_each_element(const TensorView& view, const Item& item) {
  std::array<std::int64_t, 4> size{1, 1, 1, 1};
  std::array<std::int64_t, 4> stride{};
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    size[axis] = view.shape[axis];
    stride[axis] = view.stride[axis];
  }
  for (std::int64_t a = 0; a < size[0]; ++a) {
    for (std::int64_t b = 0; b < size[1]; ++b) {
      for (std::int64_t c = 0; c < size[2]; ++c) {
        const std::int64_t row = a * stride[0] + b * stride[1] + c * stride[2];
        for (std::int64_t d = 0; d < size[3]; ++d) item(row + d * stride[3]);
      }
    }
  }
}

template <class Item>
void fill_items(const TensorView& view, Item value) {
  auto* const items = static_cast<Item*>(view.data);
  for_each_element(view, [&](std::int64_t at) { items[at] = value; });
}

// Zero has the same bits in every dtype.
void fill_zero(const TensorView& view) {
  if (!view) return;
  switch (item_size(view.dtype)) {
    case 8:
      return fill_items(view, std::uint64_t{0});
    case 4:
      return fill_items(view, std::uint32_t{0});
    default:
      return fill_items(view, std::uint16_t{0});
  }
}

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

void fill_minus_infinity(const TensorView& view) { fill_items(view, kMinusInfinity); }

// The lse of a call in which no row sees a key: the head's sink, or -inf. (batch, heads, rows).
void fill_lse_without_keys(const TensorView& lse, const TensorView& sinks) {
  if (!sinks) return fill_minus_infinity(lse);
  const HeadScalars sink = head_scalars(sinks);
  TensorView head = lse;
  head.shape[1] = 1;
  for (std::int64_t h = 0; h < lse.shape[1]; ++h) {
    auto* const items = static_cast<float*>(lse.data) + h * lse.stride[1];
    for_each_element(head, [&](std::int64_t at) { items[at] = sink.at(0, h); });
  }
}

std::uint64_t bytes_of(const TensorView& view) {
  if (!view) return 0;
  std::uint64_t bytes = item_size(view.dtype);
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    bytes *= static_cast<std::uint64_t>(view.shape[axis]);
  }
  return bytes;
}

}  // namespace

std::string CpuBackend::device() const {
  const int threads = get_num_threads();
  return processor_name() + " (" + active_isa() + ", " + std::to_string(threads) +
         (threads == 1 ? " thread)" : " threads)");
}

Support CpuBackend::available() const {
  // Asked by every call, and CPUID traps in a virtual machine: tens of microseconds.
  static const bool runs_here = !supported_isas().empty();
  if (runs_here) return {.ok = true, .reason = ""};
  return {.ok = false, .reason = "this processor runs none of the built instruction sets"};
}

std::vector<std::string> CpuBackend::features() const {
  return {"forward",
          "backward",
          "float32",
          "float16",
          "bfloat16",
          "gqa",
          "value_dim",
          "causal",
          "window",
          "q_offset",
          "k_offset",
          "kv_lengths",
          "mask",
          "softcap",
          "alibi_slopes",
          "sinks",
          "dropout_p",
          "attention_varlen",
          "attention_kvcache"};
}

Support CpuBackend::supports(const AttentionProblem& problem) const {
  if (problem.device != DeviceKind::kCpu) {
    return {.ok = false, .reason = "the arrays are not in host memory"};
  }
  // The kernels count keys in int32 lanes, padded to whole tiles.
  if (problem.seqlen_k > std::numeric_limits<std::int32_t>::max() - 128) {
    return {.ok = false,
            .reason = "seqlen_k is too large for the cpu backend (2^31 - 129 at most)"};
  }
  return {.ok = true, .reason = ""};
}

void CpuBackend::forward(const AttentionProblem& problem, const ForwardTensors& tensors) {
  settle_pending();
  const AttentionInputs& in = tensors.inputs;
  count_bytes({in.query, in.key, in.value, tensors.out, tensors.lse});
  const bool empty = problem.batch == 0 || problem.seqlen_q == 0 || problem.seqlen_k == 0;
  if (empty) {
    fill_zero(tensors.out);
    fill_lse_without_keys(tensors.lse, in.sinks);
  }
  if (problem.packed) {
    fill_zero(rows_past(tensors.out, 1, in.cu_seqlens_q));
    fill_minus_infinity(rows_past(tensors.lse, 2, in.cu_seqlens_q));
  }
  if (empty) return;
  const EntryTables tables(problem, in);
  AttentionJob job = job_of(problem, in, tables);
  job.out = query_rows(tensors.out, tables);
  job.lse = query_scalars(tensors.lse, tables);
  const CpuKernels& kernels = active_kernels();
  run_interruptibly(problem, job, [&] {
    run_decode(job, kernels, ThreadPool::global());
    run_forward(job, kernels, ThreadPool::global());
  });
}

void CpuBackend::backward(const AttentionProblem& problem, const BackwardTensors& tensors) {
  settle_pending();
  const AttentionInputs& in = tensors.inputs;
  count_bytes({in.query, in.key, in.value, tensors.out, tensors.lse, tensors.dout, tensors.dlse,
               tensors.dq, tensors.dk, tensors.dv, in.mask, in.alibi_slopes, in.sinks,
               tensors.dmask, tensors.dalibi_slopes, tensors.dsinks});
  const bool no_rows = problem.batch == 0 || problem.seqlen_q == 0;
  const bool no_scores = no_rows || problem.seqlen_k == 0;
  if (no_scores) {
    for (const TensorView& gradient : {tensors.dq, tensors.dk, tensors.dv, tensors.dmask,
                                       tensors.dalibi_slopes, tensors.dsinks}) {
      fill_zero(gradient);
    }
    // A row without keys still has the weight of its sink, and with it a gradient of lse.
    if (no_rows || !tensors.dsinks) return;
  }
  if (problem.packed) {
    fill_zero(rows_past(tensors.dq, 1, in.cu_seqlens_q));
    for (const TensorView& view : {tensors.dk, tensors.dv}) {
      fill_zero(rows_past(view, 1, in.cu_seqlens_k));
    }
  }
  const EntryTables tables(problem, in);
  AttentionJob job = job_of(problem, in, tables);
  job.out = query_rows(tensors.out, tables);
  job.lse = query_scalars(tensors.lse, tables);
  job.dout = query_rows(tensors.dout, tables);
  job.dlse = query_scalars(tensors.dlse, tables);
  job.dq = query_rows(tensors.dq, tables);
  job.dk = key_rows(tensors.dk, tables);
  job.dv = key_rows(tensors.dv, tables);
  job.dslopes = head_gradients(tensors.dalibi_slopes);
  job.dsinks = head_gradients(tensors.dsinks);
  job.dmask = mask_gradient(tensors.dmask);
  if (no_scores) {
    job.dq = job.dk = job.dv = {};
    job.dslopes = {};
    job.dmask = {};
  }
  run_interruptibly(problem, job,
                    [&] { run_backward(job, active_kernels(), ThreadPool::global()); });
}

void CpuBackend::count_bytes(std::initializer_list<TensorView> views) {
  std::uint64_t adopted = 0;
  std::uint64_t copied = 0;
  for (const TensorView& view : views) (view.copied ? copied : adopted) += bytes_of(view);
  adopted_bytes_ += adopted;
  if (copied != 0) copied_bytes_ += copied;
}

CopyStats CpuBackend::copy_stats(bool reset) {
  if (!reset) return {.adopted_bytes = adopted_bytes_, .copied_bytes = copied_bytes_};
  return {.adopted_bytes = adopted_bytes_.exchange(0), .copied_bytes = copied_bytes_.exchange(0)};
}

}  // namespace flashattn::cpu

namespace flashattn {

Backend& cpu_backend() {
  // Never destroyed: a thread of the program may still call while the process ends.
  static auto* const backend = new cpu::CpuBackend;
  return *backend;
}

}  // namespace flashattn
