// Calls for the tests of the Metal schedule, over addresses that are never touched: the schedule
// reads shapes and strides alone. They lie far apart, for make_problem refuses outputs that overlap
// inputs.
#pragma once

#include <cstdint>

#include "core/make_visibility.h"
#include "metal/schedule.h"

namespace metal_calls {

namespace fa = flashattn;
namespace metal = flashattn::metal;

// A device that has what every supported one has.
inline const metal::DeviceFacts kM1{.name = "M1", .apple_family = 7};

struct Sizes {
  int batch, query_heads, kv_heads, seqlen_q, seqlen_k, head_dim, value_dim;
};

// Which optional arrays a call has.
struct Extras {
  bool dlse = false;
  fa::TensorView mask{};  // shape and dtype; the memory is given here
  int slopes = 0;         // axes of alibi_slopes: 1 (query_heads), 2 (batch, query_heads)
  bool sinks = false;
  bool gradients = false;  // of the mask, the slopes and the sinks
};

struct Call {
  fa::BackwardTensors tensors;
  fa::AttentionProblem problem{};
  std::vector<fa::Visibility> visibility{};
};

class Addresses {
 public:
  void* next() {
    address_ += std::uintptr_t{1} << 50;
    return reinterpret_cast<void*>(address_);
  }

 private:
  std::uintptr_t address_ = 0;
};

inline void add_extras(const Sizes& s, const Extras& extras, Addresses* memory, Call* call) {
  constexpr auto kFloat32 = fa::DType::kFloat32;
  fa::BackwardTensors& t = call->tensors;
  if (extras.dlse) {
    t.dlse = fa::contiguous_view(memory->next(), kFloat32, s.batch, s.query_heads, s.seqlen_q);
  }
  if (extras.mask) {
    t.inputs.mask = extras.mask;
    t.inputs.mask.data = memory->next();
  }
  const auto slopes = [&] {
    return extras.slopes == 2
               ? fa::contiguous_view(memory->next(), kFloat32, s.batch, s.query_heads)
               : fa::contiguous_view(memory->next(), kFloat32, s.query_heads);
  };
  const auto sinks = [&] { return fa::contiguous_view(memory->next(), kFloat32, s.query_heads); };
  if (extras.slopes != 0) t.inputs.alibi_slopes = slopes();
  if (extras.sinks) t.inputs.sinks = sinks();
  if (!extras.gradients) return;
  if (extras.mask && extras.mask.dtype != fa::DType::kBool) {
    t.dmask = extras.mask;
    t.dmask.data = memory->next();
    if (t.dmask.dtype != fa::DType::kFloat64) t.dmask.dtype = kFloat32;
  }
  if (extras.slopes != 0) t.dalibi_slopes = slopes();
  if (extras.sinks) t.dsinks = sinks();
}

inline Call make_call(const Sizes& s, fa::DType dtype, const fa::AttentionOptions& options,
                      const Extras& extras = {}) {
  Addresses memory;
  const auto rows = [&](int length, int heads, int dim) {
    return fa::contiguous_view(memory.next(), dtype, s.batch, length, heads, dim);
  };
  Call call{.tensors = {.inputs = {.query = rows(s.seqlen_q, s.query_heads, s.head_dim),
                                   .key = rows(s.seqlen_k, s.kv_heads, s.head_dim),
                                   .value = rows(s.seqlen_k, s.kv_heads, s.value_dim)},
                        .out = rows(s.seqlen_q, s.query_heads, s.value_dim),
                        .lse = fa::contiguous_view(memory.next(), fa::DType::kFloat32, s.batch,
                                                   s.query_heads, s.seqlen_q),
                        .dout = rows(s.seqlen_q, s.query_heads, s.value_dim),
                        .dq = rows(s.seqlen_q, s.query_heads, s.head_dim),
                        .dk = rows(s.seqlen_k, s.kv_heads, s.head_dim),
                        .dv = rows(s.seqlen_k, s.kv_heads, s.value_dim)}};
  add_extras(s, extras, &memory, &call);
  call.problem = fa::make_problem(call.tensors, options);
  call.visibility = fa::make_visibilities(call.problem, call.tensors.inputs);
  return call;
}

inline metal::Schedule forward_of(const Call& call, const metal::DeviceFacts& facts = kM1) {
  const fa::ForwardTensors tensors{
      .inputs = call.tensors.inputs, .out = call.tensors.out, .lse = call.tensors.lse};
  return metal::schedule_forward(call.problem, tensors, call.visibility, {.facts = facts});
}

inline metal::Schedule backward_of(const Call& call, const metal::DeviceFacts& facts = kM1) {
  return metal::schedule_backward(call.problem, call.tensors, call.visibility, {.facts = facts});
}

}  // namespace metal_calls
