"""The known faults about arrays, memory, threads and the process (rows C19 ... C33), once per
backend at most.

What could abort the interpreter runs in a child process. The last test checks that all forty rows
have a test.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from cases import Case, build
from dlpack_producer import Producer, is_used

fa = pytest.importorskip("flashattn")
HERE = Path(__file__).parent


def _child(code: str, timeout: float = 120.0) -> str:
    """Runs `code` in a fresh interpreter and returns what it printed; fails on any other end than
    exit 0.
    """
    paths = [str(HERE), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)},
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _arrays(**sizes: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return build(Case(**{"batch": 1, "heads": 2, "kv_heads": 2, "head_dim": 8, **sizes})).inputs


def _expected(query: Any, key: Any, value: Any, **opts: Any) -> np.ndarray:
    return reference.attention(query, key, value, **opts).out


def test_c19_negative_strides() -> None:
    """Reversed views, from numpy and through torch where it takes them: right or an exception, no
    abort.
    """
    printed = _child("""
        import numpy as np, flashattn as fa, reference
        base = np.random.default_rng(0).standard_normal((2, 5, 2, 8)).astype(np.float32)
        back, every = slice(None, None, -1), slice(None)
        for at in ((back,), (..., back), (every, back), (..., back, every), (back,) * 4):
            view = base[at]
            try:
                out = fa.attention(view, view, view, causal=True)
            except (BufferError, ValueError) as error:
                raise SystemExit(f"refused: {error}")
            expected = reference.attention(view, view, view, causal=True).out
            np.testing.assert_allclose(out, expected, atol=2e-6)
        flat = np.arange(12.0, dtype=np.float32)[::-1].reshape(1, 3, 2, 2)
        expected = reference.attention(flat, flat, flat).out
        np.testing.assert_allclose(fa.attention(flat, flat, flat), expected, rtol=1e-5)
        print("fine")
    """)
    assert printed.strip() == "fine"


def test_c20_read_only_inputs_and_writable_outputs() -> None:
    inputs = [x.copy() for x in _arrays()]
    for x in inputs:
        x.flags.writeable = False
    out, lse = fa.attention_forward(*inputs)
    np.testing.assert_allclose(out, _expected(*inputs), atol=2e-6)
    out[...] = lse[...] = 1.0
    with pytest.raises((ValueError, TypeError), match="writ"):
        fa.attention_forward(*inputs, out=inputs[0])


@pytest.mark.parametrize("kind", ["packed_struct", "shifted_bytes", "every_third_half"])
def test_c21_byte_strides_that_are_no_multiple_of_the_item(kind: str) -> None:
    plain = _arrays(dtype="float16" if kind == "every_third_half" else "float32")

    def odd(x: np.ndarray) -> np.ndarray:
        if kind == "packed_struct":
            record = np.zeros(x.shape, np.dtype([("tag", "u1"), ("x", x.dtype)]))
            record["x"] = x
            return record["x"]
        if kind == "shifted_bytes":
            raw = np.zeros(x.nbytes + 1, np.uint8)
            raw[1:] = np.frombuffer(x.tobytes(), np.uint8)
            return np.frombuffer(raw.data, x.dtype, offset=1).reshape(x.shape)
        record = np.zeros(x.shape, np.dtype([("x", x.dtype), ("tag", "u1")]))
        record["x"] = x
        return record["x"]

    out = fa.attention(*(odd(x) for x in plain), causal=True)
    np.testing.assert_array_equal(out, fa.attention(*plain, causal=True))


def test_c22_empty_results() -> None:
    """Size-0 results come back, and leave again through DLPack, in a child process."""
    _child("""
        import numpy as np, flashattn as fa
        for shape in ((0, 3, 2, 8), (2, 0, 2, 8)):
            x = np.zeros(shape, np.float32)
            out, lse = fa.attention_forward(x, x, x)
            assert out.shape == shape and lse.size == 0
            assert np.from_dlpack(out).shape == shape
            grads = fa.attention_backward(out, x, x, x, out, lse)
            assert grads.dq.shape == grads.dk.shape == shape
        try:
            import torch
        except ImportError:
            pass
        else:
            x = torch.zeros(0, 3, 2, 8, requires_grad=True)
            fa.attention(x, x, x).sum().backward()
            assert x.grad.shape == x.shape
    """)


def test_c23_byte_offset_is_added() -> None:
    inputs = _arrays()
    padded = []
    for x in inputs:
        room = np.full(x.size + 64, np.nan, np.float32)
        room[64:] = x.ravel()
        padded.append(room[64:].reshape(x.shape))
    out = fa.attention(*(Producer(x, skip=256) for x in padded))
    np.testing.assert_array_equal(np.asarray(out), fa.attention(*inputs))


def test_c24_bfloat16_arrays() -> None:
    """ml_dtypes arrays, torch tensors and DLPack code 4 give the same bits."""
    import ml_dtypes

    inputs = _arrays(dtype="bfloat16")
    expected = fa.attention(*inputs)
    assert expected.dtype == ml_dtypes.bfloat16
    produced = fa.attention(*(Producer(x.view(np.uint16), code=4) for x in inputs))
    np.testing.assert_array_equal(np.asarray(produced).view(np.uint16), expected.view(np.uint16))
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16) for x in inputs]
    out = fa.attention(*tensors)
    assert out.dtype == torch.bfloat16
    np.testing.assert_array_equal(out.view(torch.uint16).numpy(), expected.view(np.uint16))


def test_c25_bool_mask_through_dlpack() -> None:
    """A torch bool mask is read as bool: a backend without masks says so and not that the dtype is
    wrong.
    """
    torch = pytest.importorskip("torch")
    inputs = [torch.from_numpy(x) for x in _arrays()]
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    if "mask" in _missing():
        with pytest.raises(NotImplementedError, match="mask"):
            fa.attention(*inputs, mask=mask)
        return
    out = fa.attention(*inputs, mask=mask)
    np.testing.assert_allclose(out, fa.attention(*inputs, causal=True), atol=1e-6)


def _missing() -> frozenset[str]:
    from targets import NOT_IMPLEMENTED, chosen_backend

    return NOT_IMPLEMENTED[chosen_backend()]


def test_c26_capsules_are_consumed_exactly_once() -> None:
    """Every exported capsule is taken (renamed) and its deleter called once the array is no longer
    needed.
    """
    producers = [Producer(x.copy()) for x in _arrays()]
    for _ in range(200):
        fa.attention(*producers)
    gc.collect()
    for producer in producers:
        assert producer.made == 200
        assert producer.deleted == 200
        assert all(is_used(capsule) for capsule in producer.capsules)


class _Stale(Producer):
    """Hands out one capsule, again and again."""

    def __dlpack__(self, **options: Any) -> Any:
        return self.capsules[0] if self.capsules else super().__dlpack__(**options)


def test_c26_a_capsule_is_not_taken_twice() -> None:
    inputs = _arrays()
    stale = _Stale(inputs[0].copy())
    expected = fa.attention(*inputs)
    others = [Producer(x.copy()) for x in inputs[1:]]
    np.testing.assert_array_equal(np.asarray(fa.attention(stale, *others)), expected)
    with pytest.raises((TypeError, ValueError, BufferError)):
        fa.attention(stale, *others)
    gc.collect()
    assert stale.deleted == 1


def test_c27_results_outlive_everything_else() -> None:
    inputs = [x.copy() for x in _arrays(seqlen_q=64, seqlen_k=64)]
    expected = fa.attention(*inputs).copy()
    out, lse = fa.attention_forward(*inputs)
    view = out[:, 3:5]
    del out, inputs
    gc.collect()
    noise = [np.full(expected.shape, np.nan, np.float32) for _ in range(50)]
    np.testing.assert_array_equal(view, expected[:, 3:5])
    assert np.isfinite(lse).all()
    assert len(noise) == 50


def test_c28_no_leak_over_many_shapes() -> None:
    """3000 calls of varying length: memory is flat behind the warm-up."""
    printed = (
        _child("""
        import numpy as np, flashattn as fa

        def resident():
            with open("/proc/self/statm") as f:
                return int(f.read().split()[1]) * 4096

        rng = np.random.default_rng(0)
        x = rng.standard_normal((2, 300, 2, 32)).astype(np.float32)

        def calls(count):
            for n in range(count):
                t = 1 + (n * 37) % 300
                part = x[:, :t]
                out, lse = fa.attention_forward(part, part, part, causal=True)
                fa.attention_backward(out, part, part, part, out, lse, causal=True)

        calls(300)
        before = resident()
        calls(3000)
        print(resident() - before)
    """)
        if Path("/proc/self/statm").exists()
        else "0"
    )
    assert int(printed) < 4 << 20


def test_c29_calls_from_many_threads() -> None:
    """Concurrent calls, with results dropped in other threads, agree with the lone call."""
    inputs = _arrays(seqlen_q=90, seqlen_k=90)
    expected = fa.attention(*inputs, causal=True).copy()
    wrong: list[str] = []

    def work() -> None:
        for _ in range(50):
            out, lse = fa.attention_forward(*inputs, causal=True)
            grads = fa.attention_backward(out, *inputs, out, lse, causal=True)
            if not np.array_equal(out, expected) or not np.isfinite(grads.dq).all():
                wrong.append("differs")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_c30_one_array_read_by_several_threads() -> None:
    """One producer object shared by all: no copy of it changes under another thread's hands."""
    x = _arrays(seqlen_q=70, seqlen_k=70)[0]
    shared = x[:, ::-1]
    expected = fa.attention(shared, shared, shared).copy()
    results: list[np.ndarray] = []

    def work() -> None:
        results.extend(fa.attention(shared, shared, shared) for _ in range(25))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 100
    for out in results:
        np.testing.assert_array_equal(out, expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_c31_fork_after_use() -> None:
    """A child forked after the pool ran computes, on several threads, within its alarm."""
    printed = _child("""
        import os, signal
        import numpy as np, flashattn as fa
        fa.set_num_threads(3)
        x = np.random.default_rng(0).standard_normal((2, 300, 4, 64)).astype(np.float32)
        options = {"causal": True, "backend": "cpu"}
        expected = fa.attention(x, x, x, **options)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            same = np.array_equal(fa.attention(x, x, x, **options), expected)
            os._exit(0 if same and fa.get_num_threads() == 3 else 1)
        _, status = os.waitpid(child, 0)
        assert np.array_equal(fa.attention(x, x, x, **options), expected)
        print(os.waitstatus_to_exitcode(status))
    """)
    assert printed.strip() == "0"


def test_c32_denormals_stay_on() -> None:
    """Neither import nor a call sets flush-to-zero, in this thread or a new one."""
    _child("""
        import sys, threading
        import numpy as np

        def check():
            tiny = np.float32(np.finfo(np.float32).tiny)
            assert sys.float_info.min / 2 != 0.0
            assert tiny / np.float32(4) > 0
            assert np.finfo(np.float32).smallest_subnormal > 0
            assert (np.full(64, tiny) * np.float32(0.5) > 0).all()

        import flashattn as fa
        check()
        x = np.ones((1, 200, 4, 16), np.float32)
        fa.set_num_threads(3)
        fa.attention(x, x, x)
        check()
        thread = threading.Thread(target=check)
        thread.start()
        thread.join()
    """)


def test_c33_data_written_just_before_the_call() -> None:
    """A buffer rewritten in place between two calls is read anew each time, whatever a backend
    keeps.
    """
    torch = pytest.importorskip("torch")
    query, key, value = (torch.from_numpy(x.copy()) for x in _arrays())
    named = [b.name for b in fa.backends() if b.available]
    for backend in named:
        for n in range(5):
            value.fill_(float(n))
            assert (fa.attention(query, key, value, backend=backend) - n).abs().max() < 1e-5


def test_every_row_has_a_test() -> None:
    text = "".join(
        (HERE / f"test_known_faults{part}.py").read_text() for part in ("", "_options", "_process")
    )
    missing = [n for n in range(1, 41) if f"def test_c{n:02d}_" not in text]
    assert not missing
