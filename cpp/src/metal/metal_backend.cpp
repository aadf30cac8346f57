// The Metal backend: binds a call's tensors, asks the schedule for dispatches and runs them. Which
// problems it can do is schedule.h's answer; how a kernel works is in shaders/.
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>

#include "core/make_visibility.h"
#include "core/registry.h"
#include "metal/cache_files.h"
#include "metal/call_buffers.h"
#include "metal/device.h"
#include "metal/encode.h"
#include "metal/lane_maps.h"
#include "metal/mask_table.h"
#include "metal/objects.h"
#include "metal/pipeline_cache.h"
#include "metal/schedule.h"
#include "metal/schedule_tensors.h"
#include "metal/stored_tuning.h"
#include "metal/strided_copy.h"

namespace flashattn {

namespace metal {

namespace {

constexpr std::size_t kIdlePoolBytes = std::size_t{256} << 20;

// Everything that exists once there is a GPU. Lives as long as the process.
struct Session {
  explicit Session(NS::SharedPtr<MTL::Device> found)
      : device(std::move(found)),
        pipelines(device.handle(), archive_path(device.facts().name, device.os_build())),
        pool(device.handle(), kIdlePoolBytes),
        lane_maps(&device, &pipelines, &pool),
        tuning(cache_file("tuning", device.facts().name, device.os_build(), "txt")) {}

  // What calls are scheduled with.
  DeviceFacts facts() {
    DeviceFacts facts = lane_maps.facts();
    facts.tuning = tuning.table();
    return facts;
  }

  Device device;
  PipelineCache pipelines;
  BufferPool pool;
  LaneMaps lane_maps;
  TuningStore tuning;
};

bool is_empty(const AttentionProblem& problem) {
  return problem.batch == 0 || problem.query_heads == 0 || problem.seqlen_q == 0;
}

// The per-batch arrays are read here, on the CPU, wherever they live.
std::vector<Visibility> visibilities(const AttentionProblem& problem,
                                     const AttentionInputs& inputs) {
  AttentionInputs host = inputs;
  host.q_offsets = host_view(inputs.q_offsets);
  host.kv_lengths = host_view(inputs.kv_lengths);
  return make_visibilities(problem, host);
}

// A mask as what differs: its axes of stride 0 have one element.
TensorView without_repeats(TensorView mask) {
  for (int axis = 0; axis < mask.rank; ++axis) {
    const auto i = static_cast<std::size_t>(axis);
    if (mask.stride[i] == 0 && mask.shape[i] > 1) mask.shape[i] = 1;
  }
  return mask;
}

// Binds every tensor of the call that is there, and leaves in its struct what the kernels see.
void bind_tensors(const std::vector<CallTensor>& table, CallBuffers* buffers, SlotTable* slots) {
  for (const CallTensor& tensor : table) {
    if (!*tensor.view) continue;
    BoundTensor bound;
    switch (tensor.role) {
      case TensorRole::kInput:
        bound = buffers->input(*tensor.view);
        break;
      case TensorRole::kMask:
        bound = buffers->input(without_repeats(*tensor.view));
        break;
      case TensorRole::kOutput:
        bound = buffers->output(*tensor.view);
        break;
    }
    (*slots)[tensor.slot] = bound.where;
    *tensor.view = bound.view;
  }
}

template <typename Item>
BoundBuffer table_of(const std::vector<Item>& items, CallBuffers* buffers) {
  return buffers->table(items.data(), items.size() * sizeof(Item));
}

// Binds the tables and the scratch memory of the schedule.
void bind_tables(const Schedule& schedule, const AttentionProblem& problem, const TensorView& mask,
                 CallBuffers* buffers, SlotTable* slots) {
  (*slots)[abi::kBufferRowIntervals] = table_of(schedule.row_intervals, buffers);
  if (!schedule.entries.empty()) {
    (*slots)[abi::kBufferEntries] = table_of(schedule.entries, buffers);
  }
  if (!schedule.block_table.empty()) {
    (*slots)[abi::kBufferBlockTable] = table_of(schedule.block_table, buffers);
  }
  if (problem.alibi) (*slots)[abi::kBufferRowShifts] = table_of(schedule.row_shifts, buffers);
  if (mask) {
    // Tiles of a mask that the host cannot see all count as mixed.
    const TensorView seen = host_sees(mask) ? host_view(mask) : mask;
    (*slots)[abi::kBufferMaskTiles] = table_of(mask_table(problem, seen), buffers);
  }
  for (const Scratch& scratch : schedule.scratch) {
    (*slots)[scratch.slot] = buffers->scratch(static_cast<std::size_t>(scratch.bytes));
  }
}

// The word that register kernels leave behind.
std::uint32_t status_of(const SlotTable& slots) {
  const BoundBuffer& bound = slots[abi::kBufferStatus];
  std::uint32_t status = abi::kStatusGood;
  std::memcpy(&status, static_cast<const char*>(bound.buffer->contents()) + bound.offset,
              sizeof status);
  return status;
}

// Runs what `build(facts, selects)` schedules. A status tells that the results are void and what
// would make them good: other kernels for the device's lane map, or kernels that select. A register
// kernel that the device refuses is found before anything runs, and makes way for a weaker one.
template <typename Build>
void run_call(Session* here, const AttentionProblem& problem, const TensorView& mask,
              CallBuffers* buffers, SlotTable* slots, Build&& build) {
  bool selects = false;
  for (;;) {
    const DeviceFacts facts = here->facts();
    const Schedule schedule = build(facts, selects);
    bind_tables(schedule, problem, mask, buffers, slots);
    // A kernel of the key side names both gradients, also where only one is wanted and written.
    BoundBuffer& dk = (*slots)[abi::kBufferDk];
    BoundBuffer& dv = (*slots)[abi::kBufferDv];
    if (dk.buffer == nullptr) dk = dv;
    if (dv.buffer == nullptr) dv = dk;
    constexpr std::uint32_t kGood = abi::kStatusGood;
    if (has_status(schedule)) (*slots)[abi::kBufferStatus] = buffers->table(&kGood, sizeof kGood);
    const LaneMap map = facts.map_of(problem.dtype);
    try {
      run_schedule(here->device, here->pipelines, schedule, *slots);
    } catch (const KernelRefused& refused) {
      here->lane_maps.demote(problem.dtype, map, refused.what());
      continue;
    }
    const std::uint32_t status = has_status(schedule) ? status_of(*slots) : kGood;
    if (status == abi::kStatusGood) return;
    if (status == abi::kStatusLaneMap) {
      here->lane_maps.demote(problem.dtype, map, "a kernel met another map than was probed");
    }
    if (status == abi::kStatusNonFinite) selects = true;
  }
}

void fill_zero(const TensorView& view) {
  if (view) strided_zero(host_view(view));
}

// Rows of packed tensors that no sequence owns: no kernel writes them.
void fill_slack(const AttentionProblem& problem, const ForwardTensors& t) {
  if (!problem.packed) return;
  fill_zero(rows_past(t.out, 1, t.inputs.cu_seqlens_q));
  strided_fill(host_view(rows_past(t.lse, 2, t.inputs.cu_seqlens_q)),
               -std::numeric_limits<float>::infinity());
}

void fill_slack(const AttentionProblem& problem, const BackwardTensors& t) {
  if (!problem.packed) return;
  fill_zero(rows_past(t.dq, 1, t.inputs.cu_seqlens_q));
  fill_zero(rows_past(t.dk, 1, t.inputs.cu_seqlens_k));
  fill_zero(rows_past(t.dv, 1, t.inputs.cu_seqlens_k));
}

class MetalBackend : public Backend {
 public:
  std::string name() const override { return "metal"; }
  std::string device() const override;
  Support available() const override;
  bool chosen_by_default() const override { return !kSimulated; }
  std::vector<std::string> features() const override;
  Support supports(const AttentionProblem& problem) const override;
  void forward(const AttentionProblem& problem, const ForwardTensors& tensors) override;
  void backward(const AttentionProblem& problem, const BackwardTensors& tensors) override;
  CopyStats copy_stats(bool reset) override;

  // Null on a machine without a GPU.
  Session* session() const;

 private:
  CallBuffers call_buffers(Session* session) {
    return {session->device.handle(), &session->pool, &counters_};
  }

  mutable std::once_flag looked_;
  mutable std::unique_ptr<Session> session_;
  CopyCounters counters_;
};

Session* MetalBackend::session() const {
  std::call_once(looked_, [this] {
    const AutoreleaseScope scope;
    if (NS::SharedPtr<MTL::Device> found = choose_device()) {
      session_ = std::make_unique<Session>(std::move(found));
    }
  });
  return session_.get();
}

std::string MetalBackend::device() const {
  Session* const found = session();
  if (found == nullptr) return "none";
  const DeviceFacts& facts = found->device.facts();
  return facts.name + ", Apple GPU family " + std::to_string(facts.apple_family) +
         (kSimulated ? " (simulated)" : "") +
         (found->device.usable().ok
              ? ", " + found->lane_maps.describe() + "; sizes " + found->tuning.describe()
              : "");
}

Support MetalBackend::available() const {
  const Session* found = session();
  if (found == nullptr) return {.ok = false, .reason = "this machine has no Metal device"};
  return found->device.usable();
}

std::vector<std::string> MetalBackend::features() const {
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

Support MetalBackend::supports(const AttentionProblem& problem) const {
  const Session* found = session();
  if (found == nullptr) return {.ok = false, .reason = "this machine has no Metal device"};
  const Support usable = found->device.usable();
  return usable.ok ? metal::supports(problem, found->device.facts()) : usable;
}

void MetalBackend::forward(const AttentionProblem& problem, const ForwardTensors& tensors) {
  if (is_empty(problem)) return fill_slack(problem, tensors);
  const AutoreleaseScope scope;
  Session* here = session();
  CallBuffers buffers = call_buffers(here);
  SlotTable slots{};
  ForwardTensors bound = tensors;  // with the strides that the kernels see
  bind_tensors(call_tensors(bound), &buffers, &slots);
  const std::vector<Visibility> visible = visibilities(problem, tensors.inputs);
  run_call(here, problem, bound.inputs.mask, &buffers, &slots,
           [&](const DeviceFacts& facts, bool selects) {
             return schedule_forward(problem, bound, visible, facts, selects);
           });
  buffers.finish();
  fill_slack(problem, tensors);
}

void MetalBackend::backward(const AttentionProblem& problem, const BackwardTensors& tensors) {
  // Without scores only a sink has a gradient.
  const bool no_scores = is_empty(problem) || problem.seqlen_k == 0;
  BackwardTensors bound = tensors;  // with the strides that the kernels see
  if (no_scores) {
    for (TensorView* view : {&bound.dq, &bound.dk, &bound.dv, &bound.dmask, &bound.dalibi_slopes}) {
      fill_zero(*view);
      *view = {};
    }
    if (is_empty(problem)) fill_zero(bound.dsinks);
    if (is_empty(problem) || !bound.dsinks) return;
  }
  const AutoreleaseScope scope;
  Session* here = session();
  CallBuffers buffers = call_buffers(here);
  SlotTable slots{};
  bind_tensors(call_tensors(bound), &buffers, &slots);
  const std::vector<Visibility> visible = visibilities(problem, tensors.inputs);
  run_call(here, problem, bound.inputs.mask, &buffers, &slots,
           [&](const DeviceFacts& facts, bool selects) {
             return schedule_backward(problem, bound, visible, facts, selects);
           });
  buffers.finish();
  fill_slack(problem, tensors);
}

CopyStats MetalBackend::copy_stats(bool reset) {
  if (!reset) return {counters_.adopted_bytes.load(), counters_.copied_bytes.load()};
  return {counters_.adopted_bytes.exchange(0), counters_.copied_bytes.exchange(0)};
}

// Never destroyed: at exit another thread may still be in a call.
MetalBackend& the_backend() {
  static MetalBackend* const backend = new MetalBackend;
  return *backend;
}

}  // namespace

TuningStore* device_tuning() {
  Session* const found = the_backend().session();
  return found == nullptr ? nullptr : &found->tuning;
}

DeviceFacts device_facts_in_force() { return the_backend().session()->facts(); }

std::vector<PipelineFacts> device_pipelines() { return the_backend().session()->pipelines.facts(); }

}  // namespace metal

Backend& metal_backend() { return metal::the_backend(); }

}  // namespace flashattn
