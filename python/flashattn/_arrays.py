"""Arrays of several frameworks: which framework a call belongs to, and its outputs' memory.

Reading arrays is the core's work (cpp/bindings/ndarray.cpp); it comes back to `adapt` here for
arrays that it cannot take as they are. Every framework except numpy is optional and never
imported here.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from typing import Any

import numpy as np

from flashattn import _core
from flashattn._framework import Framework, NothingSpecial, output_shapes, packed_shapes
from flashattn._metal import DLPACK_DEVICE as _DLPACK_METAL
from flashattn._metal import MetalArray, is_on_metal

_core.register_numpy(np.ndarray)

_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)
_DLPACK_CPU = 1


def _numpy_empty(shape: tuple[int, ...], dtype: Any) -> Any:
    memory = _core.Buffer(math.prod(shape) * dtype.itemsize, False)
    return np.ndarray(shape, dtype, memory)  # type: ignore[arg-type]


class NumpyFramework(NothingSpecial):
    """numpy arrays, bfloat16 of ml_dtypes included."""

    def forward_outputs(self, query: Any, value: Any, heads_first: bool) -> tuple[Any, Any]:
        out_shape, lse_shape = output_shapes(query.shape, value.shape, heads_first)
        return _numpy_empty(out_shape, query.dtype), _numpy_empty(lse_shape, _FLOAT32)

    def packed_outputs(self, query: Any, value: Any) -> tuple[Any, Any]:
        out_shape, lse_shape = packed_shapes(query.shape, value.shape)
        return _numpy_empty(out_shape, query.dtype), _numpy_empty(lse_shape, _FLOAT32)

    def gradient(self, array: Any) -> Any:
        return _numpy_empty(array.shape, array.dtype)

    def wide_gradient(self, array: Any) -> Any:
        dtype = getattr(array, "dtype", None)
        if dtype is None:  # a memoryview has a shape, and its type in a format
            dtype = np.asarray(array).dtype
        return _numpy_empty(array.shape, _FLOAT64 if dtype == _FLOAT64 else _FLOAT32)

    def is_output(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def written(self, *arrays: Any) -> None:
        pass

    def finish(self, array: Any, like: Any) -> Any:
        return array

    def draw_seed(self) -> int:
        # numpy's global generator is the one that numpy.random.seed governs.
        return int(np.random.randint(0, 2**63 - 1, dtype=np.int64))  # noqa: NPY002


class DLPackFramework(NothingSpecial):
    """Any other producer of CPU arrays. Results return through its array namespace, or as numpy."""

    def _new(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return _numpy_empty(shape, dtype)

    def forward_outputs(self, query: Any, value: Any, heads_first: bool) -> tuple[Any, Any]:
        out_shape, lse_shape = output_shapes(_shape_of(query), _shape_of(value), heads_first)
        return self._new(query, out_shape, _dtype_of(query)), self._new(query, lse_shape, _FLOAT32)

    def packed_outputs(self, query: Any, value: Any) -> tuple[Any, Any]:
        out_shape, lse_shape = packed_shapes(_shape_of(query), _shape_of(value))
        return self._new(query, out_shape, _dtype_of(query)), self._new(query, lse_shape, _FLOAT32)

    def gradient(self, array: Any) -> Any:
        return self._new(array, _shape_of(array), _dtype_of(array))

    def wide_gradient(self, array: Any) -> Any:
        wide = _FLOAT64 if _dtype_of(array) == _FLOAT64 else _FLOAT32
        return self._new(array, _shape_of(array), wide)

    def is_output(self, array: Any) -> bool:
        return False

    def written(self, *arrays: Any) -> None:
        pass

    def finish(self, array: Any, like: Any) -> Any:
        _core.settle()  # converting may read
        namespace = getattr(like, "__array_namespace__", None)
        # numpy exports no bfloat16 through DLPack; asarray reads the array through numpy's own
        # protocol.
        name = "asarray" if array.dtype.name == "bfloat16" else "from_dlpack"
        convert = getattr(namespace(), name, None) if namespace is not None else None
        return array if convert is None else convert(array)

    def draw_seed(self) -> int:
        return NUMPY.draw_seed()


class DispatchingFramework(DLPackFramework):
    """Frameworks in whose own graph every call is an operation, and whose arrays never change."""

    arrays = ""  # what the framework's arrays are called

    def is_special(self, query: Any, key: Any, value: Any) -> bool:
        return True

    def is_dispatched(self, query: Any, key: Any, value: Any) -> bool:
        return True

    def refuse_out(self, function: str, out: Any) -> None:
        """TypeError where the caller brought an array for the result."""
        if out is not None:
            message = f"{function}: out must not be given with {self.arrays}: they never change"
            raise TypeError(message)


class MetalFramework(DLPackFramework):
    """Producers in Metal memory. Results return through query's namespace, or as MetalArray."""

    def _new(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return MetalArray(like, shape, dtype)

    def is_output(self, array: Any) -> bool:
        return isinstance(array, MetalArray)

    def finish(self, array: Any, like: Any) -> Any:
        namespace = getattr(like, "__array_namespace__", None)
        convert = getattr(namespace(), "from_dlpack", None) if namespace is not None else None
        if convert is None:
            return array
        _core.settle()  # another framework's array from here on
        try:
            return convert(array)
        except (BufferError, RuntimeError, TypeError, ValueError):
            return array  # a namespace that exports Metal memory need not import it


NUMPY = NumpyFramework()
DLPACK = DLPackFramework()
METAL = MetalFramework()
# module, its type of arrays, and the module here that knows it.
_OPTIONAL = (
    ("jax", "Array", "flashattn._jax"),
    ("mlx.core", "array", "flashattn._mlx"),
)
_TORCH: Framework | None = None
_TENSOR: type | None = None


def framework_of(
    function: str, query: Any, key: Any, value: Any, names: tuple[str, str] = ("key", "value")
) -> Framework:
    """The framework of a call's arrays; `names` is what the function calls the last two.

    Raises:
        TypeError: query is no array, or key or value is of another framework.
    """
    kind = type(query)
    if type(key) is kind and type(value) is kind:
        if kind is np.ndarray:
            return NUMPY
        if kind is _TENSOR and _TORCH is not None:
            return _TORCH
    framework = one_framework(function, "query", query)
    for name, array in zip(names, (key, value), strict=True):
        if one_framework(function, name, array) is not framework:
            raise TypeError(
                f"{function}: {name} ({_type_name(array)}) must be of the framework of query "
                f"({_type_name(query)})"
            )
    return METAL if framework is DLPACK and is_on_metal(query) else framework


def one_framework(function: str, name: str, array: Any) -> Framework:
    """The framework of one array.

    Raises:
        TypeError: it is no array.
    """
    global _TORCH, _TENSOR
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{function}: {name} (masked array) must be a plain array; use the option mask"
        )
    if isinstance(array, np.ndarray):
        return NUMPY
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        if _TORCH is None:
            from flashattn import _torch

            _TORCH = _torch.TorchFramework()
            _TENSOR = torch.Tensor
        return _TORCH
    for module, kind, adapter in _OPTIONAL:
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(array, getattr(loaded, kind, ())):
            return _optional_framework(adapter)
    if hasattr(array, "__dlpack__"):
        return DLPACK
    raise TypeError(
        f"{function}: {name} ({_type_name(array)}) must be a numpy array, a torch tensor or "
        "another array with __dlpack__"
    )


@functools.cache
def _optional_framework(adapter: str) -> Framework:
    framework: Framework = importlib.import_module(adapter).FRAMEWORK
    return framework


def _type_name(array: object) -> str:
    kind = type(array)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _shape_of(array: Any) -> tuple[int, ...]:
    shape = getattr(array, "shape", None)
    return tuple(shape) if shape is not None else tuple(np.from_dlpack(array).shape)


def _dtype_of(array: Any) -> np.dtype[Any]:
    """A foreign array's dtype in numpy's terms; bfloat16 needs ml_dtypes."""
    if not hasattr(array, "dtype"):
        array = np.from_dlpack(array)
    name: Any = str(array.dtype).rpartition(".")[2]
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def adapt(function: str, argument: str, array: Any, writable: bool) -> tuple[Any, bool, bool]:
    """Makes an array importable that the core could not take as it is, or says why not.

    Returns:
        (array, its uint16 elements are bfloat16, it is a copy)

    Raises:
        TypeError: no array, or a dtype or kind that cannot be read.
        ValueError: the wrong device, too many axes, or `writable` and not writable in place.
    """
    label = f"{function}: {argument}"
    if isinstance(array, np.ndarray):
        return _adapt_numpy(label, array, writable)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        from flashattn import _torch

        return _torch.adapt(label, array, writable)
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{label} ({_type_name(array)}) must be an array")
    device = getattr(array, "__dlpack_device__", lambda: (1, 0))()
    if int(device[0]) == _DLPACK_METAL:
        raise TypeError(f"{label} ({_type_name(array)}) cannot be imported through DLPack")
    if int(device[0]) != _DLPACK_CPU:
        raise ValueError(f"{label}.device (DLPack type {int(device[0])}) must be the CPU or Metal")
    return _adapt_numpy(label, np.from_dlpack(array), writable)


def _adapt_numpy(label: str, array: np.ndarray[Any, Any], writable: bool) -> tuple[Any, bool, bool]:
    dtype = array.dtype
    if array.ndim > 4:
        raise ValueError(f"{label}.ndim ({array.ndim}) must be at most 4")
    is_bfloat16 = dtype.name == "bfloat16"
    if not is_bfloat16 and (dtype.kind not in "fbi" or not dtype.isnative):
        raise TypeError(f"{label}.dtype ({dtype}) must be a native floating, bool or integer dtype")
    if writable and not array.flags.writeable:
        raise ValueError(f"{label} (read-only) must be writable")
    copied = not array.flags.aligned or any(
        stride % dtype.itemsize
        for stride, size in zip(array.strides, array.shape, strict=True)
        if size > 1
    )
    if copied:
        if writable:
            raise ValueError(f"{label} must be aligned to its item size ({dtype.itemsize} bytes)")
        _core.settle()
        array = _copy_of_distinct(array)
    elif any(stride % dtype.itemsize for stride in array.strides):
        array = np.lib.stride_tricks.as_strided(array, array.shape, _item_strides(array))
    if is_bfloat16:
        if dtype.isnative:
            _core.register_bfloat16(dtype, np.dtype(np.uint16))
        array = array.view(np.uint16)
    return array, is_bfloat16, copied


def _copy_of_distinct(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy that repeats what the array repeats by strides of 0, and takes no memory for it."""
    first = tuple(slice(0, 1 if stride == 0 else None) for stride in array.strides)
    return np.broadcast_to(array[first].copy(), array.shape)


def _item_strides(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """The strides, with those of axes of size 1 (which mean nothing) set to the item size."""
    return tuple(
        array.itemsize if size == 1 else stride
        for stride, size in zip(array.strides, array.shape, strict=True)
    )


def empty(shape: int | tuple[int, ...], dtype: Any = np.float32) -> Any:
    """An uninitialised numpy array that starts at a page: Metal adopts it without a copy.

    Args:
        shape: an int or a tuple of ints.
        dtype: anything numpy takes as a dtype; ml_dtypes.bfloat16 too.

    Returns:
        A C-contiguous, writable numpy array. Its memory is page-aligned and fills whole pages.

    Raises:
        ValueError: a negative size.
        TypeError: numpy does not know the dtype, or it holds Python objects.
    """
    sizes = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
    if any(size < 0 for size in sizes):
        raise ValueError(f"empty: shape ({sizes}) must not have negative sizes")
    element = np.dtype(dtype)
    if element.hasobject:
        raise TypeError(f"empty: dtype ({element}) must not hold Python objects")
    memory = _core.Buffer(math.prod(sizes) * element.itemsize, True)
    return np.ndarray(sizes, element, memory)  # type: ignore[arg-type]
