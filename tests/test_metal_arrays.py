"""Arrays in Metal memory from Python: DLPack's kDLMetal, an MTLBuffer and a byte_offset.

The producers here own buffers of the simulated device, which is the only one that a test can make
without a framework; without it there is nothing to test.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import flashattn as fa
import ml_dtypes
import numpy as np
import pytest
from dlpack_producer import Producer
from flashattn import _core

pytestmark = pytest.mark.skipif(
    not hasattr(_core, "set_simulated_metal"), reason="needs the simulated Metal device"
)
METAL = 8  # kDLMetal
OPTIONS: dict[str, Any] = {"causal": True, "backend": "metal"}


def runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(_core.__file__)
    for name in ("new_buffer", "contents"):
        getattr(library, f"flashattn_simulated_{name}").restype = ctypes.c_void_p
    return library


class MetalProducer(Producer):
    """A copy of an array in a simulated MTLBuffer, `skip` bytes behind its start. A bfloat16 array
    is told by its dtype.
    """

    device = METAL

    def __init__(self, source: np.ndarray, skip: int = 0) -> None:
        bfloat16 = source.dtype == ml_dtypes.bfloat16
        bits = source.view(np.uint16) if bfloat16 else source
        self.runtime = runtime()
        self.buffer = ctypes.c_void_p(
            self.runtime.flashattn_simulated_new_buffer(ctypes.c_size_t(skip + bits.nbytes))
        )
        start = self.runtime.flashattn_simulated_contents(self.buffer)
        memory = (ctypes.c_char * (skip + bits.nbytes)).from_address(start)
        array = np.ndarray(bits.shape, bits.dtype, memory, offset=skip)
        array[...] = bits
        kinds = {"f": 2, "i": 0}  # kDLFloat, kDLInt
        super().__init__(array, skip, 4 if bfloat16 else kinds[bits.dtype.kind])

    def data_pointer(self) -> int:
        assert self.buffer.value is not None
        return self.buffer.value

    def __del__(self) -> None:
        self.runtime.flashattn_simulated_release(self.buffer)


def live_buffers() -> int:
    gc.collect()
    return int(runtime().flashattn_simulated_live_instances(b"MTLBuffer"))


def tensors(dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = ((2, 37, 4, 24), (2, 50, 2, 24), (2, 50, 2, 16), (2, 37, 4, 16))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("skip", [0, 256, 20])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_forward_and_backward_in_place(dtype: Any, skip: int) -> None:
    """The bits of the same call on host arrays, and not a byte copied."""
    *inputs, dout = tensors(dtype)
    out, lse = fa.attention_forward(*inputs, **OPTIONS)
    grads = fa.attention_backward(dout, *inputs, out, lse, **OPTIONS)

    there = [MetalProducer(x, skip) for x in inputs]
    fa.copy_stats(reset=True)
    metal_out, metal_lse = fa.attention_forward(*there, **OPTIONS)
    metal_grads = fa.attention_backward(
        MetalProducer(dout, skip), *there, metal_out, metal_lse, **OPTIONS
    )
    stats = fa.copy_stats()
    assert stats["metal"].copied_bytes == 0
    assert stats["metal"].adopted_bytes > 0
    results = (metal_out, metal_lse, *metal_grads[:3])
    for got, want in zip(results, (out, lse, *grads[:3]), strict=True):
        assert got.__dlpack_device__() == (METAL, 0)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_array_equal(got.numpy(), want)
        np.testing.assert_array_equal(np.asarray(got), want)
    assert all(producer.made == producer.deleted for producer in there)


def test_strides_and_layout() -> None:
    *inputs, _ = tensors()
    want = fa.attention(*inputs, **OPTIONS)
    swapped = []
    for x in inputs:
        producer = MetalProducer(x)
        producer.array = producer.array.transpose(0, 2, 1, 3)
        producer.shape = producer.array.shape
        swapped.append(producer)
    got = fa.attention(*swapped, layout="bhsd", **OPTIONS)
    np.testing.assert_array_equal(got.numpy().transpose(0, 2, 1, 3), want)


def test_out_and_other_arguments_on_the_device() -> None:
    *inputs, _ = tensors()
    there = [MetalProducer(x) for x in inputs]
    first, lse = fa.attention_forward(*there, **OPTIONS)
    want = first.numpy().copy()
    first.numpy()[...] = 0
    again, same_lse = fa.attention_forward(*there, out=(first, lse), **OPTIONS)
    assert again is first
    assert same_lse is lse
    np.testing.assert_array_equal(first.numpy(), want)


def test_results_return_through_the_namespace() -> None:
    class Namespace:
        taken = 0

        @classmethod
        def from_dlpack(cls, array: Any) -> Any:
            cls.taken += 1
            if cls.taken > 1:
                raise BufferError("host memory only")
            return ("imported", array)

    class WithNamespace(MetalProducer):
        def __array_namespace__(self) -> type:
            return Namespace

    there = [WithNamespace(x) for x in tensors()[:3]]
    out, lse = fa.attention_forward(*there, **OPTIONS)
    assert out[0] == "imported"
    assert out[1].__dlpack_device__() == (METAL, 0)
    assert lse.numpy().shape == (2, 4, 37)  # what the namespace refuses comes as it is


def test_results_outlive_the_call_and_are_freed() -> None:
    """A result that a consumer imported lives as long as the consumer's array."""
    there = [MetalProducer(x) for x in tensors()[:3]]
    fa.attention(*there, **OPTIONS)
    before = live_buffers()
    out = fa.attention(*there, **OPTIONS)
    want = out.numpy().copy()
    view = out.numpy()
    capsule = out.__dlpack__()
    del out
    np.testing.assert_array_equal(view, want)
    assert live_buffers() == before + 1
    del view, capsule
    assert live_buffers() == before


def test_memory_of_two_kinds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, _ = tensors()
    with pytest.raises(ValueError, match=r"key.device \(cpu\) must equal query.device \(metal\)"):
        fa.attention(MetalProducer(query), Producer(key), Producer(value), **OPTIONS)
    with pytest.raises(ValueError, match=r"key.device \(metal\) must equal query.device \(cpu\)"):
        fa.attention(Producer(query), MetalProducer(key), Producer(value), **OPTIONS)
    there = [MetalProducer(x) for x in (query, key, value)]
    with pytest.raises(ValueError, match=r"kv_lengths.device \(metal\) must"):
        fa.attention(*there, kv_lengths=MetalProducer(np.int32([3, 4])), **OPTIONS)
    monkeypatch.delenv("FLASHATTN_BACKEND", raising=False)
    with pytest.raises(NotImplementedError, match="cpu: "):
        fa.attention(*there)  # the simulated device is never chosen unless named
    with pytest.raises(NotImplementedError, match=r'backend "cpu" cannot do .* on metal'):
        fa.attention(*there, backend="cpu")


def test_a_shortage_says_so_and_the_next_call_works() -> None:
    there = [MetalProducer(x) for x in tensors()[:3]]
    want = fa.attention(*there, **OPTIONS).numpy()
    library = runtime()
    library.flashattn_simulated_refuse_allocation(1)
    try:
        with pytest.raises(RuntimeError, match=r"metal: an array of \d+ bytes cannot be allocated"):
            fa.attention(*there, **OPTIONS)
    finally:
        library.flashattn_simulated_refuse_allocation(0)
    library.flashattn_simulated_fail_next(b"the planted fault")
    with pytest.raises(RuntimeError, match=r"the planted fault(.|\n)*forward_float32"):
        fa.attention(*there, **OPTIONS)
    np.testing.assert_array_equal(fa.attention(*there, **OPTIONS).numpy(), want)
