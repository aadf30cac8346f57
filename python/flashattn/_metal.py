"""Results in Metal memory, for calls whose arrays are there.

An array that exports DLPack's kDLMetal (MLX on a Mac does) is used in place: its MTLBuffer and
byte_offset go to the kernels as they are. Its results are on the same GPU.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flashattn import _core

DLPACK_DEVICE = 8  # kDLMetal


class MetalArray:
    """A contiguous array in a Metal buffer: a DLPack producer of device kDLMetal.

    `numpy()` shows the same memory to the CPU, which Apple GPUs share it with. It waits for calls
    that a stream of this thread has left under way.

    Args:
        like: a kDLMetal producer, whose device the array is made on.
        shape: sizes of the axes.
        dtype: a floating numpy dtype; ml_dtypes.bfloat16 too.
    """

    def __init__(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.ndim = len(shape)
        # The class is there in builds with Metal alone.
        make: Any = getattr(_core, "MetalMemory", None)
        if make is None:
            raise NotImplementedError(
                "attention: query.device (metal): this build has no Metal backend"
            )
        self._memory = make(like, math.prod(shape) * dtype.itemsize)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The same memory as a numpy array."""
        _core.settle()
        array: np.ndarray[Any, Any] = np.ndarray(self.shape, self.dtype, self._memory)
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = np.array(self.numpy(), dtype, copy=copy)
        return array

    def __dlpack_device__(self) -> tuple[int, int]:
        return DLPACK_DEVICE, 0

    def __dlpack__(self, **options: Any) -> Any:
        code = 4 if self.dtype.name == "bfloat16" else 2  # kDLBfloat, kDLFloat
        producer = self._memory.producer(list(self.shape), code, 8 * self.dtype.itemsize)
        return producer.__dlpack__(**options)

    def __repr__(self) -> str:
        return f"MetalArray(shape={self.shape}, dtype={self.dtype})"


def is_on_metal(array: Any) -> bool:
    """Whether a DLPack producer says that its memory is Metal's."""
    device = getattr(array, "__dlpack_device__", None)
    return device is not None and int(device()[0]) == DLPACK_DEVICE
