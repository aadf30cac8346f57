// _core.Buffer: an uninitialised block of memory with a chosen alignment, exported through the
// buffer protocol so that numpy.ndarray(shape, dtype, buffer) is the only step left. numpy itself
// promises 16 bytes; kernels like 64, and Metal adopts whole pages without a copy.
#include "buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>

namespace flashattn::python {

namespace nb = nanobind;

namespace {

constexpr std::size_t kVectorAlignment = 64;  // bytes: a cache line, and the widest vector
// From here on first writes cost page faults worth avoiding; numpy draws the line at the same size.
constexpr std::size_t kHugePageThreshold = std::size_t{4} << 20;

std::size_t page_size() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

class Buffer {
 public:
  // Page-aligned blocks also end at a page's end, which is what Metal asks for.
  Buffer(std::size_t bytes, bool page_aligned) : bytes_(bytes) {
    const bool large = bytes >= kHugePageThreshold;
    const std::size_t alignment = page_aligned || large ? page_size() : kVectorAlignment;
    const std::size_t rounded = (bytes / alignment + 1) * alignment;
    if (rounded < bytes || posix_memalign(&data_, alignment, rounded) != 0) {
      data_ = nullptr;
      PyErr_Format(PyExc_MemoryError,
                   "flashattn: an array of %zu bytes needs more memory than there is", bytes);
      nb::raise_python_error();
    }
#ifdef MADV_HUGEPAGE
    if (large) madvise(data_, rounded, MADV_HUGEPAGE);  // a hint; its failure changes nothing
#endif
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

int export_buffer(PyObject* self, Py_buffer* view, int flags) {
  const Buffer* buffer = nb::inst_ptr<Buffer>(self);
  return PyBuffer_FillInfo(view, self, buffer->data(), static_cast<Py_ssize_t>(buffer->bytes()),
                           /*readonly=*/0, flags);
}

PyType_Slot kBufferSlots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&export_buffer)},
                              {0, nullptr}};

}  // namespace

void bind_buffer(nb::module_& module) {
  nb::class_<Buffer>(module, "Buffer", nb::type_slots(kBufferSlots),
                     "Uninitialised memory, aligned to 64 bytes or to a page.")
      .def(nb::init<std::size_t, bool>(), nb::arg("bytes"), nb::arg("page_aligned"));
}

}  // namespace flashattn::python
