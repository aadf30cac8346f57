// Python arrays as TensorViews, without copies where the memory can be read in place.
//
// Anything that nanobind can import (DLPack, the buffer protocol) is accepted. torch tensors take
// the C exchange API, which costs a thirtieth of `__dlpack__`. What cannot be imported as it is
// goes once through flashattn._arrays.adapt, which explains the refusal or returns a usable array.
// This file checks memory (device, alignment, element type), not shapes: those belong to
// make_problem.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

#include "flashattn/tensor.h"

namespace flashattn::python {

namespace nb = nanobind;

enum class Access : std::uint8_t { kRead, kWrite };

// Where an argument stands, for error messages: "attention: query ...".
struct ArgumentName {
  const char* function;
  const char* argument;
};

// What keeps an argument's memory alive behind the call. Drop it with the GIL held.
struct KeptArray {
  nb::object source;           // what the caller gave
  nb::object adapted;          // what was made of it, if anything
  nb::ndarray<nb::ro> memory;  // what was imported
};

// One array argument for the duration of a call. Create and destroy it with the GIL held.
class ArrayArgument {
 public:
  // None, or no object at all, gives the empty view.
  ArrayArgument(ArgumentName name, nb::handle array, Access access = Access::kRead);

  const TensorView& view() const { return view_; }
  KeptArray kept() const {
    return {.source = nb::borrow(source_), .adapted = adapted_, .memory = array_};
  }

 private:
  bool import_in_place(ArgumentName name, nb::handle array, Access access);
  bool import_torch(nb::handle array);
  bool import_bfloat16(nb::handle array, Access access);
  bool import_any(nb::handle array, Access access);
  void import_adapted(ArgumentName name, nb::handle array, Access access);
  void read_dtype(ArgumentName name);
  void check_memory(ArgumentName name) const;

  nb::handle source_;          // the caller's, whose reference outlives this
  nb::ndarray<nb::ro> array_;  // what keeps an imported array's memory alive
  nb::object adapted_;         // the array that adapt returned
  nb::dlpack::dtype dtype_{};
  TensorView view_;
};

void bind_arrays(nb::module_& module);

}  // namespace flashattn::python
