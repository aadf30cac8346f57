"""Arrays on their way in: strides, alignment, dtypes and producers; what is copied, what is not.

Every input is compared with the call on plain contiguous copies of the same values, bit for bit,
and copy_stats says how many bytes were copied on the way. The faults C19 to C29 of other libraries
are in test_known_faults_process.py.
"""

from __future__ import annotations

import array
from typing import Any

import dlpack_producer
import flashattn as fa
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from targets import chosen_backend

SHAPE = (2, 6, 4, 8)


def values(shape: tuple[int, ...] = SHAPE, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(5).standard_normal(shape).astype(dtype)


def copied_by(*arguments: Any, **options: Any) -> tuple[Any, int]:
    """The result and the bytes that were copied for it; all other bytes of the call are adopted."""
    fa.copy_stats(reset=True)
    out, lse = fa.attention_forward(*arguments, **options)
    stats = fa.copy_stats()[chosen_backend()]
    assert sum(stats) == sum(x.nbytes for x in (*arguments, out, lse))
    return out, stats.copied_bytes


def not_in_place(*arrays: Any) -> int:
    """Bytes of those that the backend cannot read in place: a GPU's buffers have no negative
    strides.
    """
    on_metal = chosen_backend() == "metal"
    return sum(x.nbytes for x in arrays if on_metal and min(x.strides) < 0)


def slots(x: Any) -> Any:
    larger = np.full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), np.nan, x.dtype)
    larger[:, 1::2] = x
    return larger[:, 1::2]


def reversed_axes(x: Any) -> Any:
    return x[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1]


def transposed(x: Any) -> Any:
    return x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)


def reversed_dims(x: Any) -> Any:
    return x[..., ::-1].copy()[..., ::-1]


def dims_first(x: Any) -> Any:
    return x.transpose(3, 0, 1, 2).copy().transpose(1, 2, 3, 0)


def read_only(x: Any) -> Any:
    x = x.copy()
    x.flags.writeable = False
    return x


STRIDED = [slots, reversed_axes, transposed, reversed_dims, dims_first, read_only]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("view", STRIDED, ids=lambda f: f.__name__)
def test_strided_arrays_are_read_in_place(view: Any, dtype: Any) -> None:
    q = values(dtype=dtype)
    expected = fa.attention(q, q, q, causal=True)
    out, copied = copied_by(view(q), view(q), view(q), causal=True)
    assert out.tobytes() == expected.tobytes()
    assert copied == not_in_place(*[view(q)] * 3)
    result, lse = fa.attention_forward(q, q, q)
    plain = fa.attention_backward(q, q, q, q, result, lse)
    arrays = (*[view(q)] * 4, view(result), lse[:, ::-1].copy()[:, ::-1])
    fa.copy_stats(reset=True)
    strided = fa.attention_backward(*arrays)
    assert fa.copy_stats()[chosen_backend()].copied_bytes == not_in_place(*arrays)
    for one, other in zip(plain[:3], strided[:3], strict=True):
        assert one.tobytes() == other.tobytes()


def test_broadcast_arrays_are_read_in_place() -> None:
    q, one = values(), values((2, 6, 1, 8))
    k = np.broadcast_to(one, SHAPE)
    out, copied = copied_by(q, k, k)
    assert np.array_equal(out, fa.attention(q, k.copy(), k.copy()))
    assert copied == 0


def test_adopted_bytes_are_counted() -> None:
    q = values()
    fa.copy_stats(reset=True)
    fa.attention(q, q, q)
    stats = fa.copy_stats(reset=True)[chosen_backend()]
    assert stats.adopted_bytes == 4 * q.nbytes + 2 * 6 * 4 * 4  # q, k, v, out, lse
    assert fa.copy_stats()[chosen_backend()] == (0, 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_misaligned_memory_is_copied_and_counted(dtype: Any) -> None:
    q = values(dtype=dtype)
    memory = np.zeros(q.nbytes + 1, np.uint8)
    crooked = memory[1:].view(dtype).reshape(SHAPE)
    crooked[...] = q
    assert not crooked.flags.aligned
    out, copied = copied_by(crooked, q, q)
    assert out.tobytes() == fa.attention(q, q, q).tobytes()
    assert copied == q.nbytes


def test_misaligned_torch_memory_is_copied_and_counted() -> None:
    q = torch.from_numpy(values())
    memory = bytearray(q.numel() * 4 + 1)
    crooked = torch.frombuffer(memory, dtype=torch.float32, count=q.numel(), offset=1)
    crooked = crooked.reshape(SHAPE)
    crooked.copy_(q)
    out, copied = copied_by(crooked, q, q)
    assert torch.equal(out, fa.attention(q, q, q))
    assert copied == q.numel() * 4


def test_byte_strides_between_items_are_copied_and_counted() -> None:
    q = values()
    records = np.zeros(SHAPE, np.dtype([("x", np.float32), ("pad", np.uint8)]))
    records["x"] = q
    assert records["x"].strides[-1] == 5
    out, copied = copied_by(records["x"], q, q)
    assert np.array_equal(out, fa.attention(q, q, q))
    assert copied == q.nbytes


def test_strides_of_size_one_axes_mean_nothing() -> None:
    q = values((1, 6, 1, 8))
    odd = np.lib.stride_tricks.as_strided(q, q.shape, (3, q.strides[1], 7, q.strides[3]))
    out, copied = copied_by(odd, odd, odd)
    assert np.array_equal(out, fa.attention(q, q, q))
    assert copied == 0


@pytest.mark.parametrize("shape", [(0, 6, 4, 8), (2, 0, 4, 8)])
def test_empty_calls(shape: tuple[int, ...]) -> None:
    q = np.zeros(shape, np.float32)
    k = np.zeros((shape[0], 6, 4, 8), np.float32)
    for one, other in ((q, k), (torch.from_numpy(q), torch.from_numpy(k))):
        out, lse = fa.attention_forward(one, other, other)
        assert tuple(out.shape) == shape
        gradients = fa.attention_backward(out, one, other, other, out, lse)
        assert tuple(gradients.dq.shape) == shape
        assert float(abs(gradients.dk).sum()) == 0.0


def test_no_keys() -> None:
    q, k = values(), np.zeros((2, 0, 4, 8), np.float32)
    out, lse = fa.attention_forward(q, k, k)
    assert not out.any()
    assert np.isneginf(lse).all()


class Producer:
    """An array that is nothing but its __dlpack__; `versioned` may be refused, as old ones do."""

    def __init__(self, wrapped: Any, versioned: bool = True) -> None:
        self.wrapped, self.versioned = wrapped, versioned

    def __dlpack__(self, **keywords: Any) -> Any:
        if keywords and not self.versioned:
            raise TypeError("unexpected keyword argument")
        return self.wrapped.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.wrapped.__dlpack_device__()


@pytest.mark.parametrize("versioned", [True, False])
def test_any_dlpack_producer(versioned: bool) -> None:
    q = values()
    p = Producer(q, versioned)
    out, lse = fa.attention_forward(p, p, p)
    assert isinstance(out, np.ndarray)
    assert np.array_equal(out, fa.attention(q, q, q))
    gradients = fa.attention_backward(p, p, p, p, out, lse)
    expected = fa.attention_backward(q, q, q, q, out, lse)
    assert np.array_equal(gradients.dk, expected.dk)


def test_array_api_producers_get_their_own_kind_back() -> None:
    class Wrapped(Producer):
        shape, dtype = SHAPE, np.dtype(np.float32)

        def __array_namespace__(self) -> Any:
            return Namespace

    class Namespace:
        @staticmethod
        def from_dlpack(x: Any) -> Any:
            return Wrapped(x)

    w = Wrapped(values())
    out = fa.attention(w, w, w)
    assert isinstance(out, Wrapped)
    assert np.array_equal(out.wrapped, fa.attention(values(), values(), values()))


def test_array_api_producers_get_bfloat16_back() -> None:
    """numpy cannot export it through DLPack, so it goes back another way."""

    class Wrapped:
        dtype = "bfloat16"

        def __init__(self, wrapped: Any) -> None:
            assert wrapped.dtype == ml_dtypes.bfloat16
            self.wrapped, self.shape = wrapped, wrapped.shape
            self.producer = dlpack_producer.Producer(wrapped.view(np.uint16), code=4)

        def __dlpack__(self, **keywords: Any) -> Any:
            return self.producer.__dlpack__(**keywords)

        def __dlpack_device__(self) -> Any:
            return self.producer.__dlpack_device__()

        def __array_namespace__(self) -> Any:
            return Namespace

    class Namespace:
        @staticmethod
        def from_dlpack(x: Any) -> Any:
            return np.from_dlpack(x)

        @staticmethod
        def asarray(x: Any) -> Any:
            return Wrapped(x)

    q = values(dtype=ml_dtypes.bfloat16)
    w = Wrapped(q)
    out, lse = fa.attention_forward(w, w, w)
    assert isinstance(out, Wrapped)
    expected, expected_lse = fa.attention_forward(q, q, q)
    assert out.wrapped.tobytes() == expected.tobytes()
    assert np.array_equal(lse, expected_lse)
    gradients = fa.attention_backward(w, w, w, w, out, lse)
    plain = fa.attention_backward(q, q, q, q, expected, expected_lse)
    assert gradients.dk.wrapped.tobytes() == plain.dk.tobytes()


def test_other_buffers_are_taken_as_options() -> None:
    """Objects with only the buffer protocol may stand for small arrays."""
    q = values()
    lengths = array.array("i", [3, 6])
    assert np.array_equal(
        fa.attention(q, q, q, kv_lengths=lengths), fa.attention(q, q, q, kv_lengths=[3, 6])
    )


@given(
    starts=st.tuples(*[st.integers(0, 3)] * 4),
    steps=st.tuples(*[st.sampled_from((-3, -2, -1, 1, 2, 3))] * 4),
    axes=st.permutations(range(4)),
)
def test_any_view_gives_the_bits_of_its_copy(
    starts: tuple[int, ...], steps: tuple[int, ...], axes: list[int]
) -> None:
    base = np.random.default_rng(1).standard_normal((7, 7, 7, 7)).astype(np.float32)
    cut = [
        slice(s, None, p) if p > 0 else slice(-1 - s, None, p)
        for s, p in zip(starts, steps, strict=True)
    ]
    view = base.transpose(axes)[tuple(cut)]
    assert np.array_equal(fa.attention(view, view, view), fa.attention(*[view.copy()] * 3))


def test_a_memoryview_has_a_gradient_too() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 5, 2, 8), np.float32) for _ in range(3))
    slopes = np.array([0.5, 0.25], np.float32)
    for slope_array in (slopes, memoryview(slopes)):
        out, lse = fa.attention_forward(q, k, v, alibi_slopes=slope_array)
        grads = fa.attention_backward(out, q, k, v, out, lse, alibi_slopes=slope_array)
        assert grads.dalibi_slopes.shape == (2,)
        assert grads.dalibi_slopes.dtype == np.float32
