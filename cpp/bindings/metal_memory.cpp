// _core.MetalMemory: an MTLBuffer that Python sees twice, through the buffer protocol (the host's
// view of the shared memory) and as a DLPack producer of device kDLMetal.
#include "metal_memory.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flashattn/error.h"
#include "metal/shared_memory.h"
#include "ndarray.h"

namespace flashattn::python {

namespace nb = nanobind;

namespace {

using metal::SharedMemory;

void make_like(SharedMemory* self, nb::handle like, std::size_t bytes) {
  const ArrayArgument array({"attention", "query"}, like);
  if (array.view().device != DeviceKind::kMetal) {
    throw InvalidArgument("attention: query.device (cpu) must be Metal");
  }
  new (self) SharedMemory(array.view().handle, bytes);
}

int export_buffer(PyObject* self, Py_buffer* view, int flags) {
  const SharedMemory* memory = nb::inst_ptr<SharedMemory>(self);
  return PyBuffer_FillInfo(view, self, memory->contents(), static_cast<Py_ssize_t>(memory->bytes()),
                           /*readonly=*/0, flags);
}

PyType_Slot kSlots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&export_buffer)}, {0, nullptr}};

// An object with __dlpack__ over the whole memory as one contiguous array of floats.
nb::ndarray<nb::array_api> producer(nb::handle self, const std::vector<std::size_t>& shape,
                                    int code, int bits) {
  const nb::dlpack::dtype dtype = {
      .code = static_cast<std::uint8_t>(code), .bits = static_cast<std::uint8_t>(bits), .lanes = 1};
  return {nb::inst_ptr<SharedMemory>(self)->handle(),
          shape.size(),
          shape.data(),
          self,
          nullptr,
          dtype,
          nb::device::metal::value};
}

}  // namespace

void bind_metal_memory(nb::module_& module) {
  nb::class_<SharedMemory>(module, "MetalMemory", nb::type_slots(kSlots),
                           "Uninitialised memory that the CPU and a GPU share.")
      .def("__init__", &make_like, nb::arg("like"), nb::arg("bytes"))
      .def(
          "producer",
          [](nb::handle_t<SharedMemory> self, const std::vector<std::size_t>& shape, int code,
             int bits) { return producer(self, shape, code, bits); },
          nb::arg("shape"), nb::arg("code"), nb::arg("bits"),
          "A DLPack producer of this memory, with DLPack's type code.");
}

}  // namespace flashattn::python
