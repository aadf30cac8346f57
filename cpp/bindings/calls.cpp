// _core.forward, _core.backward and _core.Options. Python hands over arrays, outputs included, and
// one Options object; here they become TensorViews in the library's (batch, seqlen, heads, dim)
// order, and the GIL is released around the computation alone. Shapes, dtypes and the values of
// options are checked by make_problem, not here.
#include "calls.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "core/per_batch.h"
#include "flashattn/attention.h"
#include "flashattn/error.h"
#include "ndarray.h"

namespace flashattn::python {

namespace {

struct FunctionNames {
  const char* forward;
  const char* backward;
};
constexpr FunctionNames kAttention = {"attention", "attention_backward"};
constexpr FunctionNames kVarlen = {"attention_varlen", "attention_varlen_backward"};

// The options under their public names. Arrays are imported at each call.
struct Options {
  std::optional<float> scale;
  Causal causal = Causal::kNone;
  std::array<std::int64_t, 2> window = {-1, -1};  // left, right
  float softcap = 0.0F;
  double dropout_p = 0.0;
  std::uint64_t dropout_seed = 0;
  std::uint64_t dropout_offset = 0;
  std::optional<std::array<std::int64_t, 6>> dropout_shard;  // in DropoutShard's order
  std::optional<std::int64_t> q_offset;
  std::int64_t k_offset = 0;
  std::string backend;
  bool heads_first = false;  // layout="bhsd"
  nb::object mask = nb::none();
  nb::object alibi_slopes = nb::none();
  nb::object sinks = nb::none();
  nb::object q_offsets = nb::none();
  nb::object kv_lengths = nb::none();
  nb::object cu_seqlens_q = nb::none();
  nb::object cu_seqlens_k = nb::none();
  nb::object block_table = nb::none();

  const FunctionNames& names() const { return cu_seqlens_q.is_none() ? kAttention : kVarlen; }
};

AttentionOptions attention_options(const Options& options) {
  AttentionOptions result = {
      .scale = options.scale,
      .causal = options.causal,
      .window = {.left = options.window[0], .right = options.window[1]},
      .softcap = options.softcap,
      .dropout = {.probability = options.dropout_p,
                  .seed = options.dropout_seed,
                  .offset = options.dropout_offset,
                  .shard = std::nullopt},
      .q_offset = options.q_offset,
      .k_offset = options.k_offset,
      .backend = options.backend,
  };
  if (options.dropout_shard) {
    const std::array<std::int64_t, 6>& shard = *options.dropout_shard;
    result.dropout.shard = DropoutShard{.global_heads = shard[0],
                                        .head_start = shard[1],
                                        .global_queries = shard[2],
                                        .query_start = shard[3],
                                        .global_keys = shard[4],
                                        .key_start = shard[5]};
  }
  return result;
}

TensorView bshd(const ArrayArgument& array, const Options& options) {
  TensorView view = array.view();
  if (options.heads_first && view.rank == 4) {
    std::swap(view.shape[1], view.shape[2]);
    std::swap(view.stride[1], view.stride[2]);
  }
  return view;
}

// The arrays every call reads, imported once and held until the call is over.
struct InputArrays {
  InputArrays(const char* function, nb::handle query_array, nb::handle key_array,
              nb::handle value_array, const Options& options)
      : query({function, "query"}, query_array),
        key({function, "key"}, key_array),
        value({function, "value"}, value_array),
        mask({function, "mask"}, options.mask),
        alibi_slopes({function, "alibi_slopes"}, options.alibi_slopes),
        sinks({function, "sinks"}, options.sinks),
        q_offsets({function, "q_offset"}, options.q_offsets),
        kv_lengths({function, "kv_lengths"}, options.kv_lengths),
        cu_seqlens_q({function, "cu_seqlens_q"}, options.cu_seqlens_q),
        cu_seqlens_k({function, "cu_seqlens_k"}, options.cu_seqlens_k),
        block_table({function, "block_table"}, options.block_table) {}

  AttentionInputs views(const Options& options) const {
    return {.query = bshd(query, options),
            .key = bshd(key, options),
            .value = bshd(value, options),
            .mask = mask.view(),
            .alibi_slopes = alibi_slopes.view(),
            .sinks = sinks.view(),
            .q_offsets = q_offsets.view(),
            .kv_lengths = kv_lengths.view(),
            .cu_seqlens_q = cu_seqlens_q.view(),
            .cu_seqlens_k = cu_seqlens_k.view(),
            .block_table = block_table.view()};
  }

  ArrayArgument query, key, value, mask, alibi_slopes, sinks, q_offsets, kv_lengths;
  ArrayArgument cu_seqlens_q, cu_seqlens_k, block_table;
};

void run_forward(nb::handle query, nb::handle key, nb::handle value, nb::handle out, nb::handle lse,
                 const Options& options, bool caller_outputs) {
  const char* const function = options.names().forward;
  const InputArrays inputs(function, query, key, value, options);
  const Access access = caller_outputs ? Access::kWrite : Access::kRead;
  const ArrayArgument out_array({function, "out"}, out, access);
  const ArrayArgument lse_array({function, "lse"}, lse, access);
  ForwardTensors tensors = {
      .inputs = inputs.views(options), .out = bshd(out_array, options), .lse = lse_array.view()};
  const PerBatchValues values(tensors.inputs);  // while the GIL keeps writers out
  const AttentionOptions plain = attention_options(options);
  const nb::gil_scoped_release release;
  forward(tensors, plain);
}

// Forward's results and the gradients that arrive; then the gradients to write, None if not wanted.
struct GradientCall {
  nb::handle out, lse, dout, dlse;
  nb::handle dq, dk, dv, dmask, dalibi_slopes, dsinks;
};

void run_backward(nb::handle query, nb::handle key, nb::handle value, const GradientCall& call,
                  const Options& options) {
  const char* const function = options.names().backward;
  const InputArrays inputs(function, query, key, value, options);
  const ArrayArgument out({function, "out"}, call.out);
  const ArrayArgument lse({function, "lse"}, call.lse);
  const ArrayArgument dout({function, "dout"}, call.dout);
  const ArrayArgument dlse({function, "dlse"}, call.dlse);
  const ArrayArgument dq({function, "dq"}, call.dq);
  const ArrayArgument dk({function, "dk"}, call.dk);
  const ArrayArgument dv({function, "dv"}, call.dv);
  const ArrayArgument dmask({function, "dmask"}, call.dmask);
  const ArrayArgument dalibi_slopes({function, "dalibi_slopes"}, call.dalibi_slopes);
  const ArrayArgument dsinks({function, "dsinks"}, call.dsinks);
  BackwardTensors tensors = {.inputs = inputs.views(options),
                             .out = bshd(out, options),
                             .lse = lse.view(),
                             .dout = bshd(dout, options),
                             .dlse = dlse.view(),
                             .dq = bshd(dq, options),
                             .dk = bshd(dk, options),
                             .dv = bshd(dv, options),
                             .dmask = dmask.view(),
                             .dalibi_slopes = dalibi_slopes.view(),
                             .dsinks = dsinks.view()};
  const PerBatchValues values(tensors.inputs);  // while the GIL keeps writers out
  const AttentionOptions plain = attention_options(options);
  const nb::gil_scoped_release release;
  backward(tensors, plain);
}

void bind_options(nb::module_& module) {
  nb::enum_<Causal>(module, "Causal")
      .value("NONE", Causal::kNone)
      .value("BOTTOM_RIGHT", Causal::kBottomRight)
      .value("TOP_LEFT", Causal::kTopLeft);
  nb::class_<Options>(module, "Options", "One call's options; the defaults are plain attention.")
      .def(nb::init<>())
      .def_rw("scale", &Options::scale, nb::arg().none())
      .def_rw("causal", &Options::causal)
      .def_rw("window", &Options::window)
      .def_rw("softcap", &Options::softcap)
      .def_rw("dropout_p", &Options::dropout_p)
      .def_rw("dropout_seed", &Options::dropout_seed)
      .def_rw("dropout_offset", &Options::dropout_offset)
      .def_rw("dropout_shard", &Options::dropout_shard, nb::arg().none())
      .def_rw("q_offset", &Options::q_offset, nb::arg().none())
      .def_rw("k_offset", &Options::k_offset)
      .def_rw("backend", &Options::backend)
      .def_rw("heads_first", &Options::heads_first)
      .def_rw("mask", &Options::mask, nb::arg().none())
      .def_rw("alibi_slopes", &Options::alibi_slopes, nb::arg().none())
      .def_rw("sinks", &Options::sinks, nb::arg().none())
      .def_rw("q_offsets", &Options::q_offsets, nb::arg().none())
      .def_rw("kv_lengths", &Options::kv_lengths, nb::arg().none())
      .def_rw("cu_seqlens_q", &Options::cu_seqlens_q, nb::arg().none())
      .def_rw("cu_seqlens_k", &Options::cu_seqlens_k, nb::arg().none())
      .def_rw("block_table", &Options::block_table, nb::arg().none());
}

}  // namespace

void bind_calls(nb::module_& module) {
  bind_options(module);
  module.def("forward", &run_forward, nb::arg("query").none(), nb::arg("key").none(),
             nb::arg("value").none(), nb::arg("out").none(), nb::arg("lse").none(),
             nb::arg("options"), nb::arg("caller_outputs"),
             "Writes out and lse. caller_outputs: they are a user's and must be writable.");
  module.def(
      "backward",
      [](nb::handle query, nb::handle key, nb::handle value, nb::handle out, nb::handle lse,
         nb::handle dout, nb::handle dlse, nb::handle dq, nb::handle dk, nb::handle dv,
         nb::handle dmask, nb::handle dalibi_slopes, nb::handle dsinks, const Options& options) {
        run_backward(query, key, value,
                     {.out = out,
                      .lse = lse,
                      .dout = dout,
                      .dlse = dlse,
                      .dq = dq,
                      .dk = dk,
                      .dv = dv,
                      .dmask = dmask,
                      .dalibi_slopes = dalibi_slopes,
                      .dsinks = dsinks},
                     options);
      },
      nb::arg("query").none(), nb::arg("key").none(), nb::arg("value").none(),
      nb::arg("out").none(), nb::arg("lse").none(), nb::arg("dout").none(), nb::arg("dlse").none(),
      nb::arg("dq").none(), nb::arg("dk").none(), nb::arg("dv").none(), nb::arg("dmask").none(),
      nb::arg("dalibi_slopes").none(), nb::arg("dsinks").none(), nb::arg("options"),
      "Writes every gradient that is given; the optional ones may be None.");
}

}  // namespace flashattn::python
