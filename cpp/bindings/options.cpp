// Options, field by field; see options.h.
#include "options.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <utility>

namespace flashattn::python {

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

InputArrays::InputArrays(const char* function, nb::handle query_array, nb::handle key_array,
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

AttentionInputs InputArrays::views(const Options& options) const {
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

}  // namespace flashattn::python
