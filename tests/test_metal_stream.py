"""flashattn.metal.stream: calls that do not wait, on the simulated device.

That device can stand still, and can run the newest command buffer first wherever nothing that Metal
knows of forbids it: what a test sees is then no luck.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import flashattn as fa
import numpy as np
import pytest
from flashattn import _core
from flashattn._flash_attn import _flash_attn_backward

simulated = pytest.mark.skipif(
    not hasattr(_core, "set_simulated_metal"), reason="needs the simulated Metal device"
)
OPTIONS: dict[str, Any] = {"causal": True, "backend": "metal"}
MOST_IN_FLIGHT = 8


def runtime() -> ctypes.CDLL:
    return ctypes.CDLL(_core.__file__)


@pytest.fixture
def gpu() -> Iterator[ctypes.CDLL]:
    """The device's switches, put back; what the tests call was seen to work before."""
    library = runtime()
    library.flashattn_simulated_fail_next.argtypes = [ctypes.c_char_p]
    with fa.metal.stream():
        chain(*tensors())
    library.flashattn_simulated_most_in_flight()
    yield library
    library.flashattn_simulated_reorder_work(0)


@contextlib.contextmanager
def standing_still(gpu: ctypes.CDLL) -> Iterator[None]:
    """Inside a stream's block, so that a test that fails there does not wait for ever."""
    gpu.flashattn_simulated_hold_work(1)
    try:
        yield
    finally:
        gpu.flashattn_simulated_hold_work(0)


@contextlib.contextmanager
def standing_still_for_a_moment(gpu: ctypes.CDLL) -> Iterator[None]:
    """Long enough for whoever does not wait to come before the device."""
    gpu.flashattn_simulated_hold_work(1)
    timer = threading.Timer(0.2, gpu.flashattn_simulated_hold_work, (0,))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def tensors(seed: int = 3) -> list[np.ndarray]:
    """Page-aligned or not, as numpy likes; adopted by the device either way."""
    rng = np.random.default_rng(seed)
    shapes = ((2, 37, 4, 16), (2, 50, 2, 16), (2, 50, 2, 16), (2, 37, 4, 16))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def chain(q: Any, k: Any, v: Any, dout: Any) -> list[np.ndarray]:
    """Calls of which each reads what the one before it wrote."""
    first, _ = fa.attention_forward(q, k, v, **OPTIONS)
    out, lse = fa.attention_forward(first, k, v, **OPTIONS)
    grads = fa.attention_backward(dout, first, k, v, out, lse, **OPTIONS)
    return [first, out, lse, grads.dq, grads.dk, grads.dv]


def assert_same(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@simulated
@pytest.mark.parametrize(
    ("chosen", "schedule"), [("row", "lifo"), ("apple", "random"), ("random:3", "priority")]
)
def test_the_bits_of_calls_that_wait(gpu: ctypes.CDLL, chosen: str, schedule: str) -> None:
    _core.set_simulated_metal("map", chosen)
    _core.set_simulated_metal("schedule", schedule)
    _core.forget_lane_maps()
    try:
        expected = chain(*tensors())
        with fa.metal.stream():
            first = chain(*tensors())
            second = chain(*tensors())
        assert_same(first, expected)
        assert_same(second, expected)
    finally:
        _core.set_simulated_metal("map", "row")
        _core.set_simulated_metal("schedule", "fifo")
        _core.forget_lane_maps()


@simulated
def test_nobody_waits_and_the_order_is_kept(gpu: ctypes.CDLL) -> None:
    expected = chain(*tensors())
    gpu.flashattn_simulated_reorder_work(1)
    with fa.metal.stream() as stream:
        with standing_still(gpu):
            got = chain(*tensors())  # returns although the device does nothing
            assert gpu.flashattn_simulated_most_in_flight() == 3
        stream.synchronize()
        assert_same(got, expected)


@simulated
def test_one_call_more_than_may_be_under_way_waits(gpu: ctypes.CDLL) -> None:
    q, k, v, _ = tensors()
    called = []

    def call() -> None:
        with fa.metal.stream():
            for _ in range(3 * MOST_IN_FLIGHT):
                fa.attention_forward(q, k, v, **OPTIONS)
                called.append(None)

    thread = threading.Thread(target=call)
    with standing_still(gpu):
        thread.start()
        deadline = time.monotonic() + 20
        while len(called) < MOST_IN_FLIGHT and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(called) == MOST_IN_FLIGHT
    thread.join(60)
    assert len(called) == 3 * MOST_IN_FLIGHT
    assert gpu.flashattn_simulated_most_in_flight() == MOST_IN_FLIGHT


@simulated
def test_arrays_live_until_the_device_is_done(gpu: ctypes.CDLL) -> None:
    expected = chain(*tensors())[0]
    with fa.metal.stream() as stream:
        with standing_still(gpu):
            arrays = tensors()
            alive = [weakref.ref(array) for array in arrays[:3]]
            out, _ = fa.attention_forward(*arrays[:3], **OPTIONS)
            del arrays
            gc.collect()
            assert all(ref() is not None for ref in alive)
        stream.synchronize()
        assert all(ref() is None for ref in alive)
    np.testing.assert_array_equal(out, expected)


@simulated
def test_staged_arrays_are_waited_for(gpu: ctypes.CDLL) -> None:
    """Negative strides are copied by the host: in, out, and where a call under way writes them."""
    q, k, v, _ = tensors()
    first, _ = fa.attention_forward(q, k, v, **OPTIONS)
    turned, _ = fa.attention_forward(first[:, :, ::-1], k, v, **OPTIONS)
    with fa.metal.stream():
        held, _ = fa.attention_forward(q, k, v, **OPTIONS)
        got, _ = fa.attention_forward(held[:, :, ::-1], k, v, **OPTIONS)
        memory = np.empty_like(turned)
        fa.attention_forward(first[:, :, ::-1], k, v, out=memory[:, :, ::-1], **OPTIONS)
        np.testing.assert_array_equal(memory[:, :, ::-1], turned)  # it has waited
    np.testing.assert_array_equal(got, turned)


@simulated
def test_the_package_waits_before_it_touches_arrays(gpu: ctypes.CDLL) -> None:
    q, k, v, _ = tensors()
    out, lse = fa.attention_forward(q, k, v, **OPTIONS)
    on_cpu, _ = fa.attention_forward(out, k, v, causal=True, backend="cpu")
    merged, _ = fa.merge_attention([out, out], [lse, lse])
    with fa.metal.stream():
        held, held_lse = fa.attention_forward(q, k, v, **OPTIONS)
        got, _ = fa.attention_forward(held, k, v, causal=True, backend="cpu")
    with fa.metal.stream():
        held, held_lse = fa.attention_forward(q, k, v, **OPTIONS)
        got_merged, _ = fa.merge_attention([held, held], [held_lse, held_lse])
    np.testing.assert_array_equal(got, on_cpu)
    np.testing.assert_array_equal(got_merged, merged)


@simulated
def test_functions_that_go_on_with_results_wait(
    gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_BACKEND", "metal")
    q, k, v, dout = tensors()
    kept, lse = fa.attention_forward(q, k, v)

    def gradients() -> list[np.ndarray]:
        grads = [np.empty_like(x) for x in (q, k, v)]
        rest = (0.0, None, False, -1, -1, 0.0, None, False)
        return [*grads, _flash_attn_backward(dout, q, k, v, kept, lse, *grads, *rest)]

    def weights() -> list[np.ndarray]:
        np.random.seed(7)  # noqa: NPY002 - the generator of dropout's seed
        return [fa.flash_attn_func(q, k, v, dropout_p=0.3, return_attn_probs=True)[2]]

    for call in (gradients, weights):
        expected = call()
        with fa.metal.stream(), standing_still_for_a_moment(gpu):
            assert_same(call(), expected)


@simulated
def test_autograd_waits(gpu: ctypes.CDLL) -> None:
    torch = pytest.importorskip("torch")

    def gradients() -> list[np.ndarray]:
        q, k, v, dout = (torch.from_numpy(x).requires_grad_() for x in tensors())
        first = fa.attention(q, k, v, **OPTIONS)
        fa.attention(first, k, v, **OPTIONS).backward(dout.detach())  # k.grad has two parts
        return [x.grad.numpy() for x in (q, k, v)]

    expected = gradients()
    with fa.metal.stream(), standing_still_for_a_moment(gpu):
        assert_same(gradients(), expected)


@simulated
def test_values_that_are_not_finite(gpu: ctypes.CDLL) -> None:
    """What makes a call run again where it may wait is right at once where it may not."""
    q, k, v, dout = tensors()
    v[:, -1] = np.nan  # the last row alone sees it
    expected = chain(q, k, v, dout)
    with fa.metal.stream():
        got = chain(q, k, v, dout)
    assert np.isfinite(got[0][:, :-1]).all()
    assert_same(got, expected)


@simulated
def test_a_cache_that_is_appended_to(gpu: ctypes.CDLL) -> None:
    rng = np.random.default_rng(5)
    queries = rng.standard_normal((4, 1, 1, 4, 16)).astype(np.float32)
    rows = rng.standard_normal((4, 2, 1, 1, 2, 16)).astype(np.float32)

    def decode() -> list[np.ndarray]:
        keys, values = np.zeros((2, 1, 300, 2, 16), np.float32)
        results = []
        for length, query, (k, v) in zip(range(290, 294), queries, rows, strict=True):
            out, _ = fa.attention_kvcache(
                query, keys, values, k=k, v=v, cache_seqlens=length, backend="metal"
            )
            results.append(out)
        return results

    expected = decode()
    with fa.metal.stream():
        got = decode()
    assert_same(got, expected)


@simulated
def test_a_failure_is_told_at_the_end_and_calls_work_again(gpu: ctypes.CDLL) -> None:
    q, k, v, _ = tensors()
    expected, _ = fa.attention_forward(q, k, v, **OPTIONS)

    def failing() -> None:
        with fa.metal.stream():
            gpu.flashattn_simulated_fail_next(b"the planted fault")
            fa.attention_forward(q, k, v, **OPTIONS)
            fa.attention_forward(q, k, v, **OPTIONS)

    with pytest.raises(RuntimeError, match=r"the planted fault(.|\n)*register_forward"):
        failing()
    with fa.metal.stream() as stream:
        gpu.flashattn_simulated_fail_next(b"the planted fault")
        fa.attention_forward(q, k, v, **OPTIONS)
        with pytest.raises(RuntimeError, match="the planted fault"):
            stream.synchronize()
        out, _ = fa.attention_forward(q, k, v, **OPTIONS)
    np.testing.assert_array_equal(out, expected)


@simulated
def test_an_exception_leaves_the_block_after_waiting(gpu: ctypes.CDLL) -> None:
    q, k, v, _ = tensors()
    expected, _ = fa.attention_forward(q, k, v, **OPTIONS)
    out = np.empty_like(expected)

    def wrong_shape() -> None:
        with fa.metal.stream():
            fa.attention_forward(q, k, v, out=out, **OPTIONS)
            fa.attention_forward(q, k[..., :8], v, **OPTIONS)

    def own_error() -> None:
        with fa.metal.stream():
            gpu.flashattn_simulated_fail_next(b"the planted fault")
            fa.attention_forward(q, k, v, **OPTIONS)
            raise KeyError("mine")

    with pytest.raises(ValueError, match="head_dim"):
        wrong_shape()
    np.testing.assert_array_equal(out, expected)
    with pytest.raises(KeyError, match="mine"):
        own_error()


@simulated
def test_streams_nest(gpu: ctypes.CDLL) -> None:
    expected = chain(*tensors())
    with fa.metal.stream():
        first = chain(*tensors())
        with fa.metal.stream() as inner:
            second = chain(*tensors())
            with pytest.raises(RuntimeError, match="entered already"), inner:
                pass
        assert_same(first, expected)
        assert_same(second, expected)
        third = chain(*tensors())
    assert_same(third, expected)


@simulated
def test_a_stream_belongs_to_its_thread(gpu: ctypes.CDLL) -> None:
    q, k, v, _ = tensors()
    expected, _ = fa.attention_forward(q, k, v, **OPTIONS)
    told: list[Any] = []

    def other(stream: fa.metal.Stream) -> None:
        out, _ = fa.attention_forward(q, k, v, **OPTIONS)
        told.append(bool((out == expected).all()))  # it waited
        try:
            stream.synchronize()
        except RuntimeError as error:
            told.append(str(error))

    with fa.metal.stream() as stream:
        fa.attention_forward(q, k, v, **OPTIONS)
        thread = threading.Thread(target=other, args=(stream,))
        thread.start()
        thread.join(60)
    assert told[0] is True
    assert "only the thread inside" in told[1]
    with pytest.raises(RuntimeError, match="only the thread inside"):
        stream.synchronize()


@simulated
def test_a_forked_child_does_not_wait(gpu: ctypes.CDLL) -> None:
    q, k, v, _ = tensors()
    with fa.metal.stream(), standing_still(gpu):
        fa.attention_forward(q, k, v, **OPTIONS)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            status = 1
            try:
                with fa.metal.stream():
                    pass
            except NotImplementedError as error:
                out, _ = fa.attention_forward(q, k, v, causal=True, backend="cpu")
                status = 0 if "forked" in str(error) and np.isfinite(out).all() else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(
    any(b.name == "metal" and b.available for b in fa.backends()), reason="there is a Metal device"
)
def test_without_a_device_there_is_one_clear_error() -> None:
    with pytest.raises(NotImplementedError, match=r"stream: this (build|machine) has no Metal"):
        fa.metal.stream()
