// _core.forward, _core.backward, _core.kvcache and _core.dropout_mask. Python hands over arrays,
// outputs included, and one Options object; here they become TensorViews in the library's (batch,
// seqlen, heads, dim) order, and the GIL is released around the computation alone. Shapes, dtypes
// and the values of options are checked by make_problem, not here.
#include "calls.h"

#include <initializer_list>

#include "computing.h"
#include "core/pending.h"
#include "core/per_batch.h"
#include "flashattn/attention.h"
#include "flashattn/dropout.h"
#include "flashattn/kv_cache.h"
#ifdef FLASHATTN_WITH_METAL
#include "metal_stream.h"
#endif
#include "ndarray.h"
#include "options.h"

namespace flashattn::python {

namespace {

// The arrays of a call that may not be done when it returns: those that the device uses.
void keep([[maybe_unused]] const InputArrays& in,
          [[maybe_unused]] std::initializer_list<const ArrayArgument*> others) {
#ifdef FLASHATTN_WITH_METAL
  keep_while_pending({&in.query, &in.key, &in.value, &in.mask, &in.alibi_slopes, &in.sinks},
                     others);
#endif
}

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
  {
    const Computing computing;
    forward(tensors, plain);
  }
  keep(inputs, {&out_array, &lse_array});
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
  {
    const Computing computing;
    backward(tensors, plain);
  }
  keep(inputs, {&out, &lse, &dout, &dlse, &dq, &dk, &dv, &dmask, &dalibi_slopes, &dsinks});
}

// What a cache call has beyond a forward call.
struct CacheCall {
  nb::handle new_key, new_value;
  nb::handle cache_seqlens, cache_batch_idx, leftpad, block_table;
  nb::handle rotary_cos, rotary_sin;
  bool rotary_interleaved;
};

// Outputs and caches are written: the caches only where there is something to append.
void run_kvcache(nb::handle query, nb::handle key, nb::handle value, nb::handle out, nb::handle lse,
                 const CacheCall& call, const Options& options, bool caller_outputs) {
  constexpr const char* kFunction = "attention_kvcache";
  const InputArrays inputs(kFunction, query, nb::none(), nb::none(), options);
  const Access cache_access = call.new_key.is_none() ? Access::kRead : Access::kWrite;
  const ArrayArgument key_cache({kFunction, "k_cache"}, key, cache_access);
  const ArrayArgument value_cache({kFunction, "v_cache"}, value, cache_access);
  const ArrayArgument new_key({kFunction, "k"}, call.new_key);
  const ArrayArgument new_value({kFunction, "v"}, call.new_value);
  const ArrayArgument lengths({kFunction, "cache_seqlens"}, call.cache_seqlens);
  const ArrayArgument batch_idx({kFunction, "cache_batch_idx"}, call.cache_batch_idx);
  const ArrayArgument leftpad({kFunction, "leftpad"}, call.leftpad);
  const ArrayArgument block_table({kFunction, "block_table"}, call.block_table);
  const ArrayArgument cos({kFunction, "rotary_cos"}, call.rotary_cos);
  const ArrayArgument sin({kFunction, "rotary_sin"}, call.rotary_sin);
  const Access access = caller_outputs ? Access::kWrite : Access::kRead;
  const ArrayArgument out_array({kFunction, "out"}, out, access);
  const ArrayArgument lse_array({kFunction, "lse"}, lse, access);
  KvCacheTensors tensors = {
      .call = {.inputs = inputs.views(options),
               .out = bshd(out_array, options),
               .lse = lse_array.view()},
      .new_key = bshd(new_key, options),
      .new_value = bshd(new_value, options),
      .rotary = {.cos = cos.view(), .sin = sin.view(), .interleaved = call.rotary_interleaved}};
  AttentionInputs& views = tensors.call.inputs;
  views.key = bshd(key_cache, options);
  views.value = bshd(value_cache, options);
  views.kv_lengths = lengths.view();
  views.kv_batch_index = batch_idx.view();
  views.kv_starts = leftpad.view();
  views.block_table = block_table.view();
  const PerBatchValues values(views);  // while the GIL keeps writers out
  const AttentionOptions plain = attention_options(options);
  {
    const Computing computing;
    attention_kvcache(tensors, plain);
  }
  keep(inputs, {&key_cache, &value_cache, &out_array, &lse_array});
}

void run_dropout_mask(nb::handle mask, const Options& options) {
  const ArrayArgument array({"dropout_mask", "mask"}, mask, Access::kWrite);
  const Dropout dropout = attention_options(options).dropout;
  const nb::gil_scoped_release release;
  dropout_mask(array.view(), dropout);
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
  module.def(
      "kvcache",
      [](nb::handle query, nb::handle key_cache, nb::handle value_cache, nb::handle out,
         nb::handle lse, nb::handle new_key, nb::handle new_value, nb::handle cache_seqlens,
         nb::handle cache_batch_idx, nb::handle leftpad, nb::handle block_table,
         nb::handle rotary_cos, nb::handle rotary_sin, bool rotary_interleaved,
         const Options& options, bool caller_outputs) {
        run_kvcache(query, key_cache, value_cache, out, lse,
                    {.new_key = new_key,
                     .new_value = new_value,
                     .cache_seqlens = cache_seqlens,
                     .cache_batch_idx = cache_batch_idx,
                     .leftpad = leftpad,
                     .block_table = block_table,
                     .rotary_cos = rotary_cos,
                     .rotary_sin = rotary_sin,
                     .rotary_interleaved = rotary_interleaved},
                    options, caller_outputs);
      },
      nb::arg("query").none(), nb::arg("key_cache").none(), nb::arg("value_cache").none(),
      nb::arg("out").none(), nb::arg("lse").none(), nb::arg("new_key").none(),
      nb::arg("new_value").none(), nb::arg("cache_seqlens").none(),
      nb::arg("cache_batch_idx").none(), nb::arg("leftpad").none(), nb::arg("block_table").none(),
      nb::arg("rotary_cos").none(), nb::arg("rotary_sin").none(), nb::arg("rotary_interleaved"),
      nb::arg("options"), nb::arg("caller_outputs"),
      "Appends new_key and new_value to the caches, in place, and writes out and lse.");
  module.def(
      "settle",
      [] {
        if (pending_work() == nullptr) return;
        const nb::gil_scoped_release release;
        settle_pending();
      },
      "Waits for what this thread left to a device: before the host touches its arrays.");
  module.def("dropout_mask", &run_dropout_mask, nb::arg("mask"), nb::arg("options"),
             "Writes 0 or 1 / (1 - p) for every score.");
}

}  // namespace flashattn::python
