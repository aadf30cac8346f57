// See metal_stream.h. A stream belongs to its thread, and so does what it keeps.
#include "metal_stream.h"

#include <nanobind/stl/string.h>

#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "core/pending.h"
#include "metal/stream.h"

namespace flashattn::python {

namespace nb = nanobind;

namespace {

using metal::Stream;

struct KeptCall {
  std::uint64_t number;  // of the stream's pending calls
  std::vector<KeptArray> arrays;
};

// Oldest first. Not destroyed with the thread, which may end without the GIL.
thread_local std::deque<KeptCall>* kept = nullptr;
thread_local std::uint64_t seen = 0;  // calls that the stream had left pending

void drop_settled() {
  const Stream* const stream = Stream::current();
  while (kept != nullptr && !kept->empty() &&
         (stream == nullptr || kept->front().number <= stream->settled())) {
    // Out of the queue before its arrays go: what their end runs may come here again.
    const KeptCall last = std::move(kept->front());
    kept->pop_front();
  }
}

void open_stream() {
  metal::open_stream();
  if (kept == nullptr) kept = new std::deque<KeptCall>;
  seen = Stream::current()->pushed();
}

// Both return the text of the first failure, or "".
std::string synchronize() {
  std::string failure;
  {
    const nb::gil_scoped_release release;
    failure = Stream::synchronize();
  }
  drop_settled();
  return failure;
}

std::string close_stream() {
  std::string failure;
  {
    const nb::gil_scoped_release release;
    failure = Stream::close();
  }
  drop_settled();
  if (Stream::current() == nullptr && kept->empty()) {
    delete kept;
    kept = nullptr;
  }
  return failure;
}

}  // namespace

void keep_while_pending(std::initializer_list<const ArrayArgument*> inputs,
                        std::initializer_list<const ArrayArgument*> others) {
  const Stream* const stream = Stream::current();
  if (stream == nullptr) return;
  if (stream->pushed() != seen) {
    seen = stream->pushed();
    try {
      KeptCall call{.number = seen, .arrays = {}};
      for (const auto& arrays : {inputs, others}) {
        for (const ArrayArgument* array : arrays) {
          if (array->view()) call.arrays.push_back(array->kept());
        }
      }
      kept->push_back(std::move(call));
    } catch (...) {
      settle_pending();  // nobody holds the arrays of a call that has begun
      throw;
    }
  }
  drop_settled();
}

void bind_metal_stream(nb::module_& module) {
  module.def("metal_open_stream", &open_stream);
  module.def("metal_synchronize", &synchronize);
  module.def("metal_close_stream", &close_stream);
}

}  // namespace flashattn::python
