// The Metal backend: binds a call's tensors, asks the schedule for dispatches and runs them. Which
// problems it can do is schedule.h's answer; how a kernel works is in shaders/.
#include <limits>
#include <memory>
#include <mutex>

#include "core/make_visibility.h"
#include "core/pending.h"
#include "core/registry.h"
#include "flashattn/error.h"
#include "metal/call_buffers.h"
#include "metal/device.h"
#include "metal/objects.h"
#include "metal/run_call.h"
#include "metal/schedule.h"
#include "metal/schedule_tensors.h"
#include "metal/session.h"
#include "metal/stored_tuning.h"
#include "metal/stream.h"
#include "metal/strided_copy.h"

namespace flashattn {

namespace metal {

namespace {

bool is_empty(const AttentionProblem& problem) {
  return problem.batch == 0 || problem.query_heads == 0 || problem.seqlen_q == 0;
}

// The per-batch arrays are read here, on the CPU, wherever they live.
std::vector<Visibility> visibilities(const AttentionProblem& problem, const AttentionInputs& inputs,
                                     std::vector<Visibility> reused) {
  AttentionInputs host = inputs;
  for (TensorView* view : {&host.q_offsets, &host.kv_lengths}) {
    settle_before_reading(*view);
    *view = host_view(*view);
  }
  return make_visibilities(problem, host, std::move(reused));
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
void bind_tensors(const CallTensors& table, Call* call) {
  for (const CallTensor& tensor : table) {
    if (!*tensor.view) continue;
    const bool written = tensor.role == TensorRole::kOutput;
    // Only a stream asks which memory a call uses.
    if (pending_work() != nullptr) call->used.push_back(used_memory(*tensor.view, written));
    BoundTensor bound;
    switch (tensor.role) {
      case TensorRole::kInput:
        bound = call->buffers.input(*tensor.view);
        break;
      case TensorRole::kMask:
        bound = call->buffers.input(without_repeats(*tensor.view));
        break;
      case TensorRole::kOutput:
        bound = call->buffers.output(*tensor.view);
        break;
    }
    call->slots[tensor.slot] = bound.where;
    *tensor.view = bound.view;
  }
}

void fill_zero(const TensorView& view) {
  if (!view) return;
  settle_before_writing(view);
  strided_zero(host_view(view));
}

// Rows of packed tensors that no sequence owns: no kernel writes them.
void fill_slack(const AttentionProblem& problem, const ForwardTensors& t) {
  if (!problem.packed) return;
  fill_zero(rows_past(t.out, 1, t.inputs.cu_seqlens_q));
  const TensorView lse = rows_past(t.lse, 2, t.inputs.cu_seqlens_q);
  settle_before_writing(lse);
  strided_fill(host_view(lse), -std::numeric_limits<float>::infinity());
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
  template <typename Tensors>
  void run(const AttentionProblem& problem, const Tensors& tensors);

  mutable std::once_flag looked_;
  mutable std::unique_ptr<Session> session_;
  mutable CopyCounters counters_;
};

Session* MetalBackend::session() const {
  std::call_once(looked_, [this] {
    const AutoreleaseScope scope;
    if (NS::SharedPtr<MTL::Device> found = choose_device()) {
      session_ = std::make_unique<Session>(std::move(found), &counters_);
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

BoundPass pass_of(const AttentionProblem& problem, const ForwardTensors& bound) {
  return {.problem = problem, .forward = &bound};
}

BoundPass pass_of(const AttentionProblem& problem, const BackwardTensors& bound) {
  return {.problem = problem, .backward = &bound};
}

// A call with something to compute.
template <typename Tensors>
void MetalBackend::run(const AttentionProblem& problem, const Tensors& tensors) {
  const AutoreleaseScope scope;
  Session* here = session();
  CallPool::Lease call = here->calls.take();
  Tensors bound = tensors;  // with the strides that the kernels see
  bind_tensors(call_tensors(bound), call.get());
  call->visible = visibilities(problem, tensors.inputs, std::move(call->visible));
  // Kernels leave these rows alone; what is copied out of staging memory does not, and waits.
  const bool staged = call->buffers.has_staged_outputs();
  if (!staged) fill_slack(problem, tensors);
  run_call(here, pass_of(problem, bound), std::move(call));
  if (staged) fill_slack(problem, tensors);
}

void MetalBackend::forward(const AttentionProblem& problem, const ForwardTensors& tensors) {
  if (is_empty(problem)) return fill_slack(problem, tensors);
  run(problem, tensors);
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
  run(problem, bound);
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

void open_stream() {
  const Support usable = the_backend().available();
  if (!usable.ok) throw Unsupported("stream: " + usable.reason);
  const AutoreleaseScope scope;
  Stream::open(the_backend().session()->device.handle());
}

std::vector<PipelineFacts> device_pipelines() { return the_backend().session()->pipelines.facts(); }

}  // namespace metal

Backend& metal_backend() { return metal::the_backend(); }

}  // namespace flashattn
