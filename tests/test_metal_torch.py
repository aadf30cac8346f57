"""torch tensors on torch's Metal device ("mps"): used in place, awaited, results where they are.

torch for Linux has no such device. The stand-in here is a tensor over a buffer of the simulated
Metal device that says it is on "mps" and exports what torch's tensors export on a Mac: kDLMetal,
the buffer and a byte_offset. It shows what the package does with such tensors, not what torch does.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Any

import flashattn as fa
import numpy as np
import pytest
import torch
from dlpack_producer import Producer
from flashattn import _core
from torch_numbers import tensors

pytestmark = pytest.mark.skipif(
    not hasattr(_core, "set_simulated_metal"), reason="needs the simulated Metal device"
)
OPTIONS: dict[str, Any] = {"causal": True, "backend": "metal"}
# The shapes of test_metal_arrays.py, whose kernels are compiled already.
SHAPES = ((2, 37, 4, 24), (2, 50, 2, 24), (2, 50, 2, 16), (2, 37, 4, 16))
DLPACK_CODES = {torch.float32: 2, torch.bfloat16: 4, torch.int32: 0, torch.bool: 6}


class Memory:
    """A simulated MTLBuffer, freed with the last tensor over it."""

    def __init__(self, size: int) -> None:
        self.runtime = ctypes.CDLL(_core.__file__)
        for name in ("new_buffer", "contents"):
            getattr(self.runtime, f"flashattn_simulated_{name}").restype = ctypes.c_void_p
        new = self.runtime.flashattn_simulated_new_buffer
        self.buffer = ctypes.c_void_p(new(ctypes.c_size_t(max(size, 1))))
        start = self.runtime.flashattn_simulated_contents(self.buffer)
        self.bytes = (ctypes.c_char * max(size, 1)).from_address(start)
        BUFFERS[start] = self

    def make_private(self) -> None:
        self.runtime.flashattn_simulated_make_private(self.buffer)


BUFFERS: dict[int, Memory] = {}


class Exported(Producer):
    """The capsule of one tensor: the buffer, and where in it the tensor starts."""

    device = 8  # kDLMetal

    def __init__(self, tensor: torch.Tensor) -> None:
        start = tensor.untyped_storage().data_ptr()
        self.memory = BUFFERS[start]
        plain = tensor.as_subclass(torch.Tensor)
        bits = plain.view(torch.int16) if tensor.dtype is torch.bfloat16 else plain
        super().__init__(bits.numpy(), tensor.data_ptr() - start, DLPACK_CODES[tensor.dtype])

    def data_pointer(self) -> int:
        assert self.memory.buffer.value is not None
        return self.memory.buffer.value


class MetalTensor(torch.Tensor):
    """A tensor over simulated Metal memory; new tensors that torch makes like it are too."""

    device = torch.device("mps")  # type: ignore[assignment]
    _MAKERS = (torch.empty_like, torch.Tensor.new_empty)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.cpu:
            return result.as_subclass(torch.Tensor).clone()
        return allocate(result.shape, result.dtype) if func in cls._MAKERS else result

    def __dlpack_device__(self) -> Any:
        return 8, 0

    def __dlpack__(self, **_: Any) -> Any:
        producer = Exported(self)
        KEPT.append(producer)
        return producer.__dlpack__()


KEPT: list[Exported] = []


def allocate(shape: Any, dtype: Any) -> MetalTensor:
    memory = Memory(math.prod(shape) * dtype.itemsize)
    plain = torch.frombuffer(memory.bytes, dtype=torch.uint8)[: math.prod(shape) * dtype.itemsize]
    return plain.view(dtype).view(tuple(shape)).as_subclass(MetalTensor)


def on_metal(x: torch.Tensor) -> MetalTensor:
    made = allocate(x.shape, x.dtype)
    made.as_subclass(torch.Tensor).copy_(x)
    return made


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.detach().as_subclass(torch.Tensor)


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often torch's queue was awaited; and the stand-in counts as a tensor of torch's own."""
    fa.attention(*[torch.ones(1, 1, 1, 8)] * 3, backend="cpu")
    from flashattn import _torch

    found: list[int] = []
    monkeypatch.setattr(_torch, "_PLAIN_TYPES", {*_torch._PLAIN_TYPES, MetalTensor})
    monkeypatch.setattr(torch.mps, "synchronize", lambda: found.append(1))
    yield found
    KEPT.clear()
    for memory in BUFFERS.values():
        memory.runtime.flashattn_simulated_release(memory.buffer)
    BUFFERS.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward_in_place(dtype: Any, waits: list[int]) -> None:
    """The bits of the same call on host tensors, nothing copied, results on the device."""
    *inputs, dout = tensors(*SHAPES, dtype=dtype)
    out, lse = fa.attention_forward(*inputs, **OPTIONS)
    grads = fa.attention_backward(dout, *inputs, out, lse, **OPTIONS)
    there = [on_metal(x) for x in inputs]
    fa.copy_stats(reset=True)
    results = fa.attention_forward(*there, **OPTIONS)
    assert len(waits) == 5  # three inputs, two results
    found = fa.attention_backward(on_metal(dout), *there, *results, **OPTIONS)
    assert fa.copy_stats()["metal"].copied_bytes == 0
    for got, want in zip((*results, *found[:3]), (out, lse, *grads[:3]), strict=True):
        assert isinstance(got, MetalTensor)
        assert torch.equal(plain(got), want)


def test_autograd() -> None:
    *inputs, dout = tensors(*SHAPES)
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = fa.attention(*leaves, **OPTIONS)
    there = [on_metal(x).requires_grad_() for x in inputs]

    def unpack(x: torch.Tensor) -> MetalTensor:
        return x.as_subclass(MetalTensor)  # torch keeps the class of its own tensors only

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        out = fa.attention(*there, **OPTIONS)
        found = torch.autograd.grad(out, there, on_metal(dout))
    assert torch.equal(plain(out), expected.detach())
    for got, want in zip(found, torch.autograd.grad(expected, leaves, dout), strict=True):
        assert torch.equal(plain(got), want)


def test_views_start_at_their_byte_offset() -> None:
    *inputs, _ = tensors(*SHAPES)
    there = [on_metal(torch.cat([x, x]).transpose(1, 2).contiguous())[2:] for x in inputs]
    out = fa.attention(*there, layout="bhsd", **OPTIONS)
    assert torch.equal(plain(out).transpose(1, 2), fa.attention(*inputs, **OPTIONS))


def test_lengths_may_be_on_the_device() -> None:
    *inputs, _ = tensors(*SHAPES)
    lengths = torch.tensor([50, 13], dtype=torch.int32)
    there = [on_metal(x) for x in inputs]
    out = fa.attention(*there, kv_lengths=on_metal(lengths), **OPTIONS)
    assert torch.equal(plain(out), fa.attention(*inputs, kv_lengths=lengths, **OPTIONS))


def make_private() -> None:
    """All buffers of the test."""
    for memory in BUFFERS.values():
        memory.make_private()


def test_private_memory() -> None:
    """torch's buffers need not be visible to the host, which reads masks only to save work."""
    *inputs, _ = tensors(*SHAPES)
    mask = torch.from_numpy(np.random.default_rng(1).random((2, 1, 37, 50)) < 0.5)
    there = [on_metal(x) for x in (*inputs, mask)]
    make_private()
    out = fa.attention(*there[:3], mask=there[3], **OPTIONS)
    assert torch.equal(plain(out), fa.attention(*inputs, mask=mask, **OPTIONS))


def test_private_memory_that_the_host_must_touch_is_refused() -> None:
    """Rows behind the last sequence, which no kernel writes."""
    query, key, value = (x[0] for x in tensors(*SHAPES)[:3])
    there = [on_metal(x) for x in (query, key, value)]
    whole, lse = fa.attention_varlen(*there, [0, 37], [0, 50], **OPTIONS)
    make_private()
    out = (whole, lse)
    again, _ = fa.attention_varlen(*there, [0, 37], [0, 50], out=out, **OPTIONS)
    expected, _ = fa.attention_varlen(query, key, value, [0, 37], [0, 50], **OPTIONS)
    assert torch.equal(plain(again), expected)
    with pytest.raises(NotImplementedError, match="private memory of the GPU"):
        fa.attention_varlen(*there, [0, 30], [0, 50], out=out, **OPTIONS)


def test_other_devices_are_refused() -> None:
    query, key, value, _ = tensors(*SHAPES)
    with pytest.raises(ValueError, match=r"key.device \(cpu\) must equal query.device \(metal\)"):
        fa.attention(on_metal(query), key, value, **OPTIONS)
    with pytest.raises(ValueError, match=r"query.device \(meta\) must be cpu or mps"):
        fa.attention(*(x.to("meta") for x in (query, key, value)), **OPTIONS)
