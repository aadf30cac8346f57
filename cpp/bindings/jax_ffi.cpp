// Attention for XLA's runtime. Handlers run in XLA's threads, any number of them at a time, and
// touch no Python object, so they neither hold nor need the GIL. Every array is host memory, dense
// and row-major; XLA keeps it alive and apart until the handler returns. Errors go back as XLA's
// own with the library's text. flashattn/_jax.py makes the calls that are read here.
#include "jax_ffi.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core/checks.h"
#include "core/pending.h"
#include "core/per_batch.h"
#include "flashattn/attention.h"
#include "flashattn/backend.h"
#include "flashattn/problem.h"
#include "options.h"
#include "xla_frame.h"

namespace flashattn::python {

namespace {

// Options that a program may compute, and that change from call to call without a new program: one
// operand "numbers", uint32 (kNumbers, 2), low words first.
enum Number : std::size_t {
  kDropoutSeed,
  kDropoutOffset,
  kQueryOffset,
  kKeyOffset,
  kShard,  // six, in DropoutShard's order
  kNumbers = kShard + 6,
};

// One call: what its frame names, and how many examples vmap has made of it.
struct Call {
  explicit Call(const xla::CallFrame& frame)
      : attributes(frame.attributes),
        operands(frame.operands, attributes.text("operands")),
        results(frame.results, attributes.text("results")),
        packed(operands.find("cu_seqlens_q") != nullptr),
        heads_first(attributes.integer("heads_first", 0) != 0) {
    const xla::Buffer* query = operands.find("query");
    if (query == nullptr || frame.results.count == 0) {
      throw InvalidArgument("attention: operands must have a query, and a result be wanted");
    }
    const std::int64_t lead = query->rank - (packed ? 3 : 4);
    // Results have every axis of vmap in full.
    const auto& first = *static_cast<const xla::Buffer*>(frame.results.values[0]);
    if (lead < 0 || first.rank < lead) {
      throw InvalidArgument("attention: query.ndim (" + std::to_string(query->rank) + ") must be " +
                            (packed ? "3" : "4"));
    }
    lead_sizes.assign(first.sizes, first.sizes + lead);
    operands.check_lead(lead_sizes, true);
    results.check_lead(lead_sizes, false);
  }

  xla::FrameAttributes attributes;
  xla::NamedBuffers operands;
  xla::NamedBuffers results;
  bool packed;
  bool heads_first;
  std::vector<std::int64_t> lead_sizes;
};

// The arrays and numbers of one example.
class Example {
 public:
  Example(const Call& call, const std::vector<std::int64_t>& index) : call_(call), index_(index) {}

  TensorView operand(const char* name) const { return call_.operands.view(name, index_); }
  TensorView result(const char* name) const { return call_.results.view(name, index_); }
  // Arrays whose axes `layout` names, with seqlen before heads.
  TensorView bshd_operand(const char* name) const { return bshd(operand(name)); }
  TensorView bshd_result(const char* name) const { return bshd(result(name)); }

  AttentionInputs inputs() const {
    return {.query = bshd_operand("query"),
            .key = bshd_operand("key"),
            .value = bshd_operand("value"),
            .mask = operand("mask"),
            .alibi_slopes = operand("alibi_slopes"),
            .sinks = operand("sinks"),
            .q_offsets = operand("q_offset"),
            .kv_lengths = operand("kv_lengths"),
            .cu_seqlens_q = operand("cu_seqlens_q"),
            .cu_seqlens_k = operand("cu_seqlens_k"),
            .block_table = operand("block_table")};
  }

  AttentionOptions options() const;

 private:
  TensorView bshd(TensorView view) const {
    if (call_.heads_first && view.rank == 4) {
      std::swap(view.shape[1], view.shape[2]);
      std::swap(view.stride[1], view.stride[2]);
    }
    return view;
  }
  std::vector<std::uint64_t> numbers() const;

  const Call& call_;
  const std::vector<std::int64_t>& index_;
};

std::vector<std::uint64_t> Example::numbers() const {
  std::vector<std::uint64_t> values(kNumbers, 0);
  const xla::Buffer* buffer = call_.operands.find("numbers");
  if (buffer == nullptr) return values;
  const auto lead = static_cast<std::int64_t>(index_.size());
  const bool fits = buffer->type == xla::ElementType::kUInt32 && buffer->rank == lead + 2 &&
                    buffer->sizes[lead] == std::int64_t{kNumbers} && buffer->sizes[lead + 1] == 2;
  if (!fits) {
    throw InvalidArgument("attention: numbers must be uint32 (" + std::to_string(kNumbers) +
                          ", 2)");
  }
  std::int64_t row = 0;
  for (std::size_t axis = 0; axis < index_.size(); ++axis) {
    const std::int64_t size = buffer->sizes[axis];
    row = row * size + (size == 1 ? 0 : index_[axis]);
  }
  const auto* words =
      static_cast<const std::uint32_t*>(buffer->data) + row * 2 * std::int64_t{kNumbers};
  for (std::size_t i = 0; i < kNumbers; ++i) {
    values[i] = words[2 * i] | static_cast<std::uint64_t>(words[2 * i + 1]) << 32;
  }
  return values;
}

AttentionOptions Example::options() const {
  const xla::FrameAttributes& attributes = call_.attributes;
  const std::vector<std::uint64_t> numbers = this->numbers();
  const auto signed_number = [&](std::size_t i) { return static_cast<std::int64_t>(numbers[i]); };
  AttentionOptions options = {
      .causal = static_cast<Causal>(attributes.integer("causal", 0)),
      .window = {.left = attributes.integer("window_left", -1),
                 .right = attributes.integer("window_right", -1)},
      .softcap = static_cast<float>(attributes.real("softcap").value_or(0.0)),
      .dropout = {.probability = attributes.real("dropout_p").value_or(0.0),
                  .seed = numbers[kDropoutSeed],
                  .offset = numbers[kDropoutOffset]},
      .k_offset = signed_number(kKeyOffset),
      .backend = std::string(attributes.text("backend")),
  };
  if (const auto scale = attributes.real("scale")) options.scale = static_cast<float>(*scale);
  if (attributes.integer("has_q_offset", 0) != 0) options.q_offset = signed_number(kQueryOffset);
  if (attributes.integer("has_dropout_shard", 0) != 0) {
    options.dropout.shard = DropoutShard{.global_heads = signed_number(kShard),
                                         .head_start = signed_number(kShard + 1),
                                         .global_queries = signed_number(kShard + 2),
                                         .query_start = signed_number(kShard + 3),
                                         .global_keys = signed_number(kShard + 4),
                                         .key_start = signed_number(kShard + 5)};
  }
  return options;
}

void run_forward(const Example& example) {
  const WithoutPendingWork at_once;  // XLA takes a call that returned for one that is done
  forward(
      {.inputs = example.inputs(), .out = example.bshd_result("out"), .lse = example.result("lse")},
      example.options());
}

void run_backward(const Example& example) {
  const WithoutPendingWork at_once;
  backward({.inputs = example.inputs(),
            .out = example.bshd_operand("out"),
            .lse = example.operand("lse"),
            .dout = example.bshd_operand("dout"),
            .dlse = example.operand("dlse"),
            .dq = example.bshd_result("dq"),
            .dk = example.bshd_result("dk"),
            .dv = example.bshd_result("dv"),
            .dmask = example.result("dmask"),
            .dalibi_slopes = example.result("dalibi_slopes"),
            .dsinks = example.result("dsinks")},
           example.options());
}

// Each example is a call of its own and has the bits that it has alone.
void run_examples(const xla::CallFrame& frame, void (*run)(const Example&)) {
  const Call call(frame);
  std::int64_t count = 1;
  for (const std::int64_t size : call.lead_sizes) count *= size;
  std::vector<std::int64_t> index(call.lead_sizes.size());
  for (std::int64_t n = 0; n < count; ++n) {
    std::int64_t rest = n;
    for (std::size_t axis = index.size(); axis-- > 0; rest /= call.lead_sizes[axis]) {
      index[axis] = rest % call.lead_sizes[axis];
    }
    run(Example(call, index));
  }
}

xla::Error* fail(const xla::CallFrame& frame, xla::ErrorCode code, const char* message) {
  xla::ErrorArguments arguments = {.struct_size = offsetof(xla::ErrorArguments, code) + sizeof code,
                                   .extensions = nullptr,
                                   .message = message,
                                   .code = code};
  return frame.api->create_error(&arguments);
}

// XLA asks each handler once what it was made for: its own version, if it is one that is known
// here.
bool answered_metadata(const xla::CallFrame& frame) {
  if (frame.extensions == nullptr || frame.extensions->kind != xla::ExtensionKind::kMetadata) {
    return false;
  }
  xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(frame.extensions)->metadata;
  metadata.version.major = xla::kMajorVersion;
  metadata.version.minor = std::clamp(frame.api == nullptr ? 0 : frame.api->version.minor,
                                      xla::kOldestMinorVersion, xla::kNewestMinorVersion);
  metadata.traits = 0;
  return true;
}

// A frame that has grown in its middle is one that this build cannot read.
bool is_readable(const xla::CallFrame& frame) {
  return frame.operands.struct_size == sizeof(xla::Values) &&
         frame.results.struct_size == sizeof(xla::Values) &&
         frame.attributes.struct_size == sizeof(xla::Attributes);
}

// No exception may leave a handler: XLA is built without them.
xla::Error* handle(const xla::CallFrame& frame, void (*run)(const Example&)) {
  using Code = xla::ErrorCode;
  if (!is_readable(frame)) {
    return fail(frame, Code::kInternal, "attention: this XLA's call frames have another layout");
  }
  if (answered_metadata(frame)) return nullptr;
  try {
    run_examples(frame, run);
    return nullptr;
  } catch (const InvalidArgument& error) {
    return fail(frame, Code::kInvalidArgument, error.what());
  } catch (const InvalidType& error) {
    return fail(frame, Code::kInvalidArgument, error.what());
  } catch (const Unsupported& error) {
    return fail(frame, Code::kUnimplemented, error.what());
  } catch (const std::bad_alloc&) {
    return fail(frame, Code::kResourceExhausted, "attention: out of memory");
  } catch (const std::exception& error) {
    return fail(frame, Code::kInternal, error.what());
  }
}

xla::Error* handle_forward(xla::CallFrame* frame) { return handle(*frame, &run_forward); }
xla::Error* handle_backward(xla::CallFrame* frame) { return handle(*frame, &run_backward); }

// What attention would say of arrays of these shapes and dtypes, which are not read beyond their
// integers: for a program that is traced before it has arrays.
void check_call(nb::handle query, nb::handle key, nb::handle value, const Options& options) {
  const InputArrays inputs(options.names().forward, query, key, value, options);
  AttentionInputs views = inputs.views(options);
  const PerBatchValues values(views);
  const AttentionOptions plain = attention_options(options);
  choose_backend(problem_of_inputs(views, plain), plain.backend);
}

nb::capsule capsule(xla::Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

}  // namespace

void bind_jax_ffi(nb::module_& module) {
  module.def("check_call", &check_call, nb::arg("query"), nb::arg("key"), nb::arg("value"),
             nb::arg("options"), "Raises what `forward` would raise before it computes.");
  module.def("jax_forward", [] { return capsule(&handle_forward); }, "An XLA FFI handler.");
  module.def("jax_backward", [] { return capsule(&handle_backward); }, "An XLA FFI handler.");
}

}  // namespace flashattn::python
