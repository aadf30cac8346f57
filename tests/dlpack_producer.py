"""The smallest DLPack producer: capsules over a numpy array's memory, with any byte_offset, that
count their use.

Written against dlpack.h's unversioned structs through ctypes, so that a test can see what a
consumer does with the capsule: whether it adds byte_offset, renames the capsule and calls the
deleter.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _DELETER))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype = ctypes.c_char_p
_capsule_name.argtypes = [ctypes.py_object]


class Producer:
    """Exports a float32 or bfloat16 (as uint16) array, `skip` bytes behind the capsule's data
    pointer.
    """

    device = 1  # kDLCPU

    def __init__(self, array: np.ndarray, skip: int = 0, code: int = 2) -> None:
        self.array, self.skip, self.code = array, skip, code
        self.dtype = "bfloat16" if code == 4 else str(array.dtype)
        self.shape, self.ndim = array.shape, array.ndim
        self.made = self.deleted = 0
        self.capsules: list[Any] = []
        self.kept: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def data_pointer(self) -> int:
        """What the capsule's `data` holds; the first element is `skip` bytes behind it."""
        return self.array.ctypes.data - self.skip

    def __dlpack__(self, **_: Any) -> Any:
        self.made += 1
        sizes = ctypes.c_int64 * self.array.ndim
        shape = sizes(*self.array.shape)
        strides = sizes(*(s // self.array.itemsize for s in self.array.strides))

        def delete(_: Any) -> None:
            self.deleted += 1

        managed = _Managed(
            _DLTensor(
                self.data_pointer(),
                self.device,
                0,
                self.array.ndim,
                self.code,
                8 * self.array.itemsize,
                1,
                shape,
                strides,
                self.skip,
            ),
            None,
            _DELETER(delete),
        )
        self.kept.append((managed, shape, strides))
        capsule = _new_capsule(ctypes.addressof(managed), b"dltensor", None)
        self.capsules.append(capsule)
        return capsule


def is_used(capsule: Any) -> bool:
    """Whether a consumer took the capsule, which it says by renaming it."""
    return bytes(_capsule_name(capsule)) == b"used_dltensor"
