// ArrayArgument: the three ways in (torch's C exchange API, nanobind's import,
// flashattn._arrays.adapt) and the checks of memory that follow. It relies on each type being
// registered by the Python package when its framework is first met, so that neither torch nor
// ml_dtypes is imported from here.
#include "ndarray.h"

#include <algorithm>
#include <string>

#include "flashattn/error.h"

namespace flashattn::python {

namespace {

using DLTensor = nb::dlpack::dltensor;
using DTypeCode = nb::dlpack::dtype_code;

// The head of DLPack's exchange table (DLPack 1.3), as far as it is used here. The layout is the
// ABI.
struct ExchangeTable {
  std::uint32_t major;
  std::uint32_t minor;
  void* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*borrow)(void* object, DLTensor* tensor);  // fills a view that lives as long as the object
  void* current_stream;
};

constexpr std::uint32_t kExchangeMajor = 1;

// Types of optional frameworks. References taken at registration are kept for the life of the
// process.
struct KnownTypes {
  PyObject* tensor = nullptr;
  PyObject* parameter = nullptr;
  const ExchangeTable* torch = nullptr;
  PyObject* numpy_array = nullptr;
  PyObject* bfloat16 = nullptr;  // numpy's dtype object for ml_dtypes.bfloat16
  PyObject* uint16 = nullptr;
};

KnownTypes known;

std::string prefix(ArgumentName name) { return std::string(name.function) + ": " + name.argument; }

bool to_dtype(nb::dlpack::dtype given, DType& dtype) {
  if (given.lanes != 1) return false;
  switch (static_cast<DTypeCode>(given.code)) {
    case DTypeCode::Float:
      dtype = given.bits == 16   ? DType::kFloat16
              : given.bits == 32 ? DType::kFloat32
                                 : DType::kFloat64;
      return given.bits == 16 || given.bits == 32 || given.bits == 64;
    case DTypeCode::Bfloat:
      dtype = DType::kBFloat16;
      return given.bits == 16;
    case DTypeCode::Bool:
      dtype = DType::kBool;
      return given.bits == 8;
    case DTypeCode::Int:
      dtype = given.bits == 32 ? DType::kInt32 : DType::kInt64;
      return given.bits == 32 || given.bits == 64;
    default:
      return false;
  }
}

std::string dlpack_name(nb::dlpack::dtype given) {
  std::string bits = std::to_string(given.bits);
  if (given.lanes != 1) bits += "x" + std::to_string(given.lanes);
  switch (static_cast<DTypeCode>(given.code)) {
    case DTypeCode::Int:
      return "int" + bits;
    case DTypeCode::UInt:
      return "uint" + bits;
    case DTypeCode::Float:
      return "float" + bits;
    case DTypeCode::Complex:
      return "complex" + bits;
    default:
      return "DLPack code " + std::to_string(given.code) + ", " + bits + " bits";
  }
}

// Fails on more axes than a TensorView has; a 0-d array becomes one axis of size 1.
bool fill_view(const DLTensor& tensor, TensorView& view) {
  if (tensor.ndim > 4) return false;
  view.rank = std::max(tensor.ndim, 1);
  view.shape[0] = 1;
  std::int64_t contiguous = 1;
  for (int axis = tensor.ndim - 1; axis >= 0; --axis) {
    const auto i = static_cast<std::size_t>(axis);
    view.shape[i] = tensor.shape[axis];
    view.stride[i] = tensor.strides != nullptr ? tensor.strides[axis] : contiguous;
    contiguous *= tensor.shape[axis];
  }
  constexpr std::int32_t kDLMetal = nb::device::metal::value;
  if (tensor.device.device_type == kDLMetal) {
    view.device = DeviceKind::kMetal;
    view.handle = tensor.data;
    view.byte_offset = static_cast<std::int64_t>(tensor.byte_offset);
  } else {
    view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  }
  return true;
}

bool empty(const TensorView& view) {
  return std::any_of(view.shape.begin(), view.shape.begin() + view.rank,
                     [](std::int64_t size) { return size == 0; });
}

bool misaligned(const TensorView& view) {
  return reinterpret_cast<std::uintptr_t>(view.data) % item_size(view.dtype) != 0;
}

// torch marks a lazily negated view with a bit that no DLPack export carries.
bool negated(nb::handle tensor) {
  static PyObject* const method = PyUnicode_InternFromString("is_neg");
  const nb::object answer = nb::steal(PyObject_CallMethodNoArgs(tensor.ptr(), method));
  if (!answer.is_valid()) PyErr_Clear();
  return answer.ptr() != Py_False;
}

// Subclasses included: adapt makes plain tensors of them.
bool is_tensor(nb::handle array) {
  return known.tensor != nullptr &&
         PyType_IsSubtype(Py_TYPE(array.ptr()), reinterpret_cast<PyTypeObject*>(known.tensor)) != 0;
}

void register_torch(nb::handle tensor, nb::handle parameter) {
  const nb::object capsule = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_CheckExact(capsule.ptr())) return;
  const auto* table =
      static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table == nullptr) nb::raise_python_error();
  if (table->major != kExchangeMajor || table->borrow == nullptr) return;
  known.tensor = tensor.inc_ref().ptr();
  known.parameter = parameter.inc_ref().ptr();
  known.torch = table;
}

void register_numpy(nb::handle array) { known.numpy_array = array.inc_ref().ptr(); }

void register_bfloat16(nb::handle bfloat16, nb::handle uint16) {
  known.uint16 = uint16.inc_ref().ptr();
  known.bfloat16 = bfloat16.inc_ref().ptr();
}

// A producer's capsule, or the array itself where nanobind asks for one as well as can be done.
// DLPack wants a capsule renamed once it is consumed. nanobind does that to a capsule it is given,
// but not to one it asks for, which is safe only with producers that keep no reference to it, as
// numpy does.
nb::object importable(nb::handle array) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(array.ptr()));
  if (type == known.numpy_array || !nb::hasattr(array, "__dlpack__")) return nb::borrow(array);
  const nb::object method = array.attr("__dlpack__");
  try {
    return method(nb::arg("max_version") = nb::make_tuple(nb::dlpack::major_version, 0));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) return nb::borrow(array);
  }
  try {
    return method();
  } catch (nb::python_error&) {
    return nb::borrow(array);  // nanobind fails in its turn, and adapt explains
  }
}

}  // namespace

ArrayArgument::ArrayArgument(ArgumentName name, nb::handle array, Access access) : source_(array) {
  if (!array.is_valid() || array.is_none()) return;
  if (!import_in_place(name, array, access)) import_adapted(name, array, access);
  check_memory(name);
}

// False when the array can only be used, or its refusal only be explained, by adapt.
bool ArrayArgument::import_in_place(ArgumentName name, nb::handle array, Access access) {
  const bool imported = is_tensor(array)
                            ? import_torch(array)
                            : import_bfloat16(array, access) || import_any(array, access);
  if (!imported) return false;
  read_dtype(name);
  return view_.device == DeviceKind::kMetal || !misaligned(view_);
}

void ArrayArgument::read_dtype(ArgumentName name) {
  if (to_dtype(dtype_, view_.dtype)) return;
  throw InvalidType(prefix(name) + ".dtype (" + dlpack_name(dtype_) +
                    ") must be a dtype that attention can read");
}

bool ArrayArgument::import_torch(nb::handle array) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(array.ptr()));
  if (known.torch == nullptr || (type != known.tensor && type != known.parameter)) return false;
  DLTensor tensor;
  if (known.torch->borrow(array.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  // A view of another device, or of no memory (a fake tensor), is not to be trusted.
  if (tensor.device.device_type != nb::device::cpu::value || !fill_view(tensor, view_))
    return false;
  if ((view_.data == nullptr && !empty(view_)) || negated(array)) return false;
  dtype_ = tensor.dtype;
  return true;
}

// numpy cannot export ml_dtypes.bfloat16 by any protocol: the same bytes go in as uint16.
bool ArrayArgument::import_bfloat16(nb::handle array, Access access) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(array.ptr()));
  if (known.bfloat16 == nullptr || type != known.numpy_array) return false;
  if (array.attr("dtype").ptr() != known.bfloat16) return false;
  if (!import_any(array.attr("view")(nb::handle(known.uint16)), access)) return false;
  dtype_ = {.code = static_cast<std::uint8_t>(DTypeCode::Bfloat), .bits = 16, .lanes = 1};
  return true;
}

bool ArrayArgument::import_any(nb::handle array, Access access) {
  if (access == Access::kWrite) {
    nb::ndarray<> writable;
    if (!nb::try_cast(importable(array), writable)) return false;
    array_ = nb::ndarray<nb::ro>(writable);
  } else if (!nb::try_cast(importable(array), array_)) {
    return false;
  }
  DLTensor tensor;
  tensor.data = const_cast<void*>(array_.data_handle());
  tensor.byte_offset = static_cast<std::uint64_t>(array_.byte_offset());
  tensor.device = {array_.device_type(), array_.device_id()};
  tensor.ndim = static_cast<std::int32_t>(array_.ndim());
  tensor.shape = const_cast<std::int64_t*>(array_.shape_ptr());
  tensor.strides = const_cast<std::int64_t*>(array_.stride_ptr());
  const std::int32_t device = array_.device_type();
  if (device != nb::device::cpu::value && device != nb::device::metal::value) return false;
  if (!fill_view(tensor, view_)) return false;
  dtype_ = array_.dtype();
  return true;
}

// adapt(function, argument, array, writable) raises with the reason, or returns (array, bfloat16,
// copied): an importable array, whether its uint16 elements are bfloat16, and whether it is a copy.
void ArrayArgument::import_adapted(ArgumentName name, nb::handle array, Access access) {
  array_ = {};
  view_ = {};
  const nb::tuple result = nb::cast<nb::tuple>(
      nb::module_::import_("flashattn._arrays")
          .attr("adapt")(name.function, name.argument, array, access == Access::kWrite));
  adapted_ = nb::object(result[0]);
  if (!import_torch(adapted_) && !import_any(adapted_, access)) {
    throw InvalidType(prefix(name) + " cannot be imported through DLPack or the buffer protocol");
  }
  if (nb::cast<bool>(result[1])) {
    dtype_ = {.code = static_cast<std::uint8_t>(DTypeCode::Bfloat), .bits = 16, .lanes = 1};
  }
  read_dtype(name);
  view_.copied = nb::cast<bool>(result[2]);
}

void ArrayArgument::check_memory(ArgumentName name) const {
  if (view_.device == DeviceKind::kMetal) return;
  if (view_.data == nullptr && !empty(view_)) {
    throw InvalidType(prefix(name) + " has a shape but no memory behind it");
  }
  if (misaligned(view_)) {
    throw InvalidArgument(prefix(name) + " must start at a multiple of its item size (" +
                          std::to_string(item_size(view_.dtype)) + " bytes)");
  }
}

void bind_arrays(nb::module_& module) {
  module.def("register_torch", &register_torch, nb::arg("tensor"), nb::arg("parameter"),
             "Lets tensors of exactly these types in through DLPack's C exchange API.");
  module.def("register_numpy", &register_numpy, nb::arg("array"), "Tells numpy's array type.");
  module.def("register_bfloat16", &register_bfloat16, nb::arg("bfloat16"), nb::arg("uint16"),
             "Lets numpy arrays of this bfloat16 dtype in as uint16 views.");
}

}  // namespace flashattn::python
