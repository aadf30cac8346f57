// merge_attention over lists of arrays; see flashattn/merge.h. Axes are put into the library's
// order here, and a part without a batch axis (packed sequences) gets one.
#include "merge.h"

#include <deque>
#include <string>
#include <utility>

#include "flashattn/merge.h"
#include "ndarray.h"

namespace flashattn::python {

namespace {

using ArrayList = nb::typed<nb::list, nb::object>;

constexpr const char* kForward = "merge_attention";
constexpr const char* kBackward = "merge_attention_backward";

// Arrays of one call, held until it is over.
class Arrays {
 public:
  Arrays(const char* function, bool heads_first) : function_(function), heads_first_(heads_first) {}

  // (batch, seqlen_q, heads, dim), or without the batch axis.
  TensorView rows(const char* name, nb::handle array, Access access = Access::kRead) {
    TensorView view = batched(name, array, access, 4);
    if (heads_first_ && view.rank == 4) {
      std::swap(view.shape[1], view.shape[2]);
      std::swap(view.stride[1], view.stride[2]);
    }
    return view;
  }

  // (batch, heads, seqlen_q), likewise.
  TensorView scalars(const char* name, nb::handle array, Access access = Access::kRead) {
    return batched(name, array, access, 3);
  }

  std::vector<TensorView> all_rows(const char* name, const ArrayList& list) {
    std::vector<TensorView> views;
    for (const nb::handle array : list) views.push_back(rows(name, array));
    return views;
  }

  std::vector<TensorView> all_scalars(const char* name, const ArrayList& list) {
    std::vector<TensorView> views;
    for (const nb::handle array : list) views.push_back(scalars(name, array));
    return views;
  }

 private:
  TensorView batched(const char* name, nb::handle array, Access access, int rank) {
    arrays_.emplace_back(ArgumentName{function_, name}, array, access);
    TensorView view = arrays_.back().view();
    if (view.rank != rank - 1) return view;
    for (auto axis = static_cast<std::size_t>(rank - 1); axis > 0; --axis) {
      view.shape[axis] = view.shape[axis - 1];
      view.stride[axis] = view.stride[axis - 1];
    }
    view.rank = rank;
    view.shape[0] = 1;
    view.stride[0] = 0;
    return view;
  }

  const char* function_;
  bool heads_first_;
  std::deque<ArrayArgument> arrays_;  // not movable
};

void run_merge(const ArrayList& outs, const ArrayList& lses, nb::handle out, nb::handle lse,
               bool heads_first) {
  Arrays arrays(kForward, heads_first);
  const MergeTensors tensors = {.outs = arrays.all_rows("outs", outs),
                                .lses = arrays.all_scalars("lses", lses),
                                .out = arrays.rows("out", out),
                                .lse = arrays.scalars("lse", lse)};
  const nb::gil_scoped_release release;
  merge_attention(tensors);
}

void run_merge_backward(const ArrayList& outs, const ArrayList& lses, nb::handle dout,
                        nb::handle dlse, const ArrayList& douts, const ArrayList& dlses,
                        bool heads_first) {
  Arrays arrays(kBackward, heads_first);
  const MergeTensors tensors = {.outs = arrays.all_rows("outs", outs),
                                .lses = arrays.all_scalars("lses", lses)};
  const MergeGradients gradients = {.dout = arrays.rows("dout", dout),
                                    .dlse = arrays.scalars("dlse", dlse),
                                    .douts = arrays.all_rows("douts", douts),
                                    .dlses = arrays.all_scalars("dlses", dlses)};
  const nb::gil_scoped_release release;
  merge_attention_backward(tensors, gradients);
}

}  // namespace

void bind_merge(nb::module_& module) {
  module.def("merge", &run_merge, nb::arg("outs"), nb::arg("lses"), nb::arg("out"), nb::arg("lse"),
             nb::arg("heads_first"), "Writes the merged out and lse.");
  module.def("merge_backward", &run_merge_backward, nb::arg("outs"), nb::arg("lses"),
             nb::arg("dout"), nb::arg("dlse").none(), nb::arg("douts"), nb::arg("dlses"),
             nb::arg("heads_first"),
             "Writes the gradients of the parts; None in a list where none is wanted.");
}

}  // namespace flashattn::python
