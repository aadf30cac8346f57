"""Arguments that nobody should pass, for tests/fuzz_binding.py: arrays of every kind that the
binding might misread, and numbers that do not fit.

What claims to be memory is memory: a view never reaches past its array, so that every crash is the
package's.
"""

from __future__ import annotations

import ctypes
from typing import Any

import dlpack_producer
import ml_dtypes
import numpy as np

Random = np.random.Generator

MOST_COPIED = 1 << 20  # elements of an array that is made into another one
NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 7, -2, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63), 2**64, 10**30),
    *(0.0, -0.0, 0.5, 1.5, -1.0, float("nan"), float("inf"), float("-inf"), 1e300, 5e-324),
    *(None, True, False, "1", b"1", (), (1,), (1, 2), [1, 2, 3], 1j, object(), {}, int, "top_left"),
    *(np.int64(3), np.float32(0.25), np.bool_(True), np.array(2), np.array([1, 2]), np.float16(2)),
]
DTYPES: list[Any] = [
    *("f4", "f2", "f8", "g", ">f4", "i4", "i8", "u1", "i1", "?", "c8", "O", "U3", "S4", "M8[s]"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.dtype([("a", "f4"), ("b", "f4")])),
]


def _pick(rng: Random, choices: list[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def _as_dtype(array: np.ndarray, dtype: Any) -> np.ndarray:
    try:
        with np.errstate(all="ignore"):
            return np.asarray(array).real.astype(dtype)
    except (TypeError, ValueError):
        return np.zeros(np.shape(array), dtype)


class _Claims(dlpack_producer.Producer):
    """A producer whose capsule says something unusual about memory that is there."""

    def __init__(self, array: np.ndarray, rng: Random) -> None:
        super().__init__(np.ascontiguousarray(array, np.float32))
        self.lie = _pick(rng, ["code", "bits", "lanes", "device", "ndim", "raises", "name", "none"])

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2 if self.lie == "device" else 1), 0

    def __dlpack__(self, **options: Any) -> Any:
        if self.lie == "raises":
            raise BufferError("no export today")
        if self.lie == "none":
            return None
        if self.lie == "name":
            return dlpack_producer._new_capsule(ctypes.addressof(ctypes.c_int()), b"other", None)
        capsule = super().__dlpack__(**options)
        tensor = self.kept[-1][0].tensor
        if self.lie == "code":
            tensor.code = 99
        elif self.lie == "bits":
            tensor.bits = 24
        elif self.lie == "lanes":
            tensor.lanes = 4
        elif self.lie == "device":
            tensor.device_type = 2
        elif self.lie == "ndim":
            tensor.ndim = 0
        return capsule


def _odd_bytes(array: np.ndarray) -> np.ndarray:
    record = np.zeros(array.shape, np.dtype([("tag", "u1"), ("x", array.dtype)]))
    record["x"] = array
    return record["x"]


def _size_one_strides(array: np.ndarray, rng: Random) -> np.ndarray:
    """Strides of axes of size 1 mean nothing, so they may be anything."""
    strides = [
        int(rng.integers(-(2**62), 2**62)) if size == 1 else stride
        for size, stride in zip(array.shape, array.strides, strict=True)
    ]
    return np.lib.stride_tricks.as_strided(array, array.shape, strides)


def _reshaped(array: np.ndarray, rng: Random) -> np.ndarray:
    shape = [int(rng.integers(0, 4)) if rng.random() < 0.4 else n for n in array.shape]
    if rng.random() < 0.5:
        shape = shape[: int(rng.integers(0, len(shape) + 1))]
    elif rng.random() < 0.5:
        shape += [1] * int(rng.integers(1, 30))
    return np.resize(array, shape) if np.prod(shape) and array.size else np.zeros(shape, "f4")


def array(rng: Random, given: Any) -> Any:
    """Something in the place of an array: most often another array."""
    if not isinstance(given, np.ndarray) or given.dtype == np.dtype(object):
        return _pick(rng, NUMBERS)
    if given.size > MOST_COPIED:  # an earlier turn repeated it without memory: hostile enough
        return given
    kind = int(rng.integers(16))
    if kind == 0:
        return _as_dtype(given, _pick(rng, DTYPES))
    if kind == 1:
        return _reshaped(given, rng)
    if kind == 2:
        return given[tuple(slice(None, None, int(rng.choice([-1, 1]))) for _ in given.shape)]
    if kind == 3:
        return given.transpose(rng.permutation(given.ndim))
    if kind == 4:
        first = given[tuple(slice(0, 1) for _ in given.shape)]
        return np.broadcast_to(first, given.shape)
    if kind == 5 and given.ndim:
        huge = list(given[:1].shape)
        huge[0] = int(_pick(rng, [2**20, 2**31, 2**40, 2**50]))
        return np.broadcast_to(given[:1], huge) if given.size else given
    if kind == 6:
        return _size_one_strides(given, rng)
    if kind == 7:
        return _odd_bytes(given)
    if kind == 8:
        frozen = given.copy()
        frozen.flags.writeable = False
        return frozen
    if kind == 9:
        return _Claims(given.astype(np.float32), rng)
    if kind == 10:
        return dlpack_producer.Producer(np.ascontiguousarray(given, np.float32))
    if kind == 11:
        return _pick(rng, [given.tolist(), memoryview(given.tobytes()), np.ma.array(given)])
    if kind == 12:
        return given.view(type("Sub", (np.ndarray,), {}))
    if kind == 13:
        bad = given.astype(np.float64)
        bad[rng.random(bad.shape) < 0.3] = _pick(rng, [np.nan, np.inf, -np.inf, 1e300])
        return _as_dtype(bad, given.dtype)
    if kind == 14:
        return given[..., :0]
    return _pick(rng, NUMBERS)


def integers(rng: Random, given: Any) -> Any:
    """In the place of lengths, offsets and tables."""
    if isinstance(given, np.ndarray) and given.size > MOST_COPIED:
        return given
    values = np.array(given)
    kind = int(rng.integers(6))
    if kind == 0:
        return rng.integers(-3, 40, values.shape)
    if kind == 1:
        return rng.choice([0, -1, 2**31 - 1, 2**62, -(2**63)], values.shape)
    if kind == 2:
        return _as_dtype(values, _pick(rng, DTYPES))
    if kind == 3:
        return values[..., :-1] if values.ndim else values
    if kind == 4:
        return values.tolist()
    return array(rng, values)


def number(rng: Random) -> Any:
    return _pick(rng, NUMBERS)
