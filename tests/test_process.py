"""The package as a guest in a process: memory, threads, fork, exit, floating-point state."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import flashattn as fa
import numpy as np
import pytest
from targets import chosen_backend, chosen_is_simulated


def problem(seqlen: int = 200) -> list[Any]:
    rng = np.random.default_rng(seqlen)
    return [rng.standard_normal((2, seqlen, 2, 16), np.float32) for _ in range(4)]


def results(arrays: list[Any]) -> list[bytes]:
    q, k, v, dout = arrays
    out, lse = fa.attention_forward(q, k, v, causal=True)
    gradients = fa.attention_backward(dout, q, k, v, out, lse, causal=True)
    return [x.tobytes() for x in (out, lse, *gradients[:3])]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as text:
        return int(text.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_many_calls_of_varying_shape_leave_nothing() -> None:
    few, many = (50, 200) if chosen_is_simulated() else (500, 3000)

    def calls(count: int) -> None:
        for n in range(count):
            seqlen = 1 + 17 * n % 97
            q, k, v, dout = (x[:, :seqlen] for x in arrays)
            out, lse = fa.attention_forward(q, k, v, causal=bool(n % 2))
            fa.attention_backward(dout, q, k, v, out, lse, causal=bool(n % 2))

    arrays = problem(97)
    calls(few)
    gc.collect()
    memory, objects = resident_bytes(), len(gc.get_objects())
    calls(many)
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    assert resident_bytes() - memory < 4 << 20


def test_errors_leave_nothing() -> None:
    import tracemalloc

    q, k, v, _ = problem(8)

    def calls(count: int) -> None:
        for _ in range(count):
            for wrong in ({"scale": "x"}, {"window": (-5, 0)}, {"mask": q}, {"out": q}):
                with pytest.raises((TypeError, ValueError)):
                    fa.attention(q, k, v, **wrong)

    calls(50)
    references = sys.getrefcount(q)
    tracemalloc.start()
    try:
        calls(50)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        calls(200)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()
    assert sys.getrefcount(q) == references


def test_inputs_are_not_kept_alive() -> None:
    arrays = problem(8)
    counts = [sys.getrefcount(x) for x in arrays]
    results(arrays)
    assert [sys.getrefcount(x) for x in arrays] == counts


def test_threads_do_not_change_the_bits() -> None:
    arrays, before = problem(300), fa.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 5):
            fa.set_num_threads(threads)
            found.append(results(arrays))
    finally:
        fa.set_num_threads(before)
    assert all(other == found[0] for other in found[1:])


def test_calls_from_many_python_threads() -> None:
    arrays = problem()
    expected, found = results(arrays), []

    def call() -> None:
        for _ in range(10):
            found.append(results(arrays))

    workers = [threading.Thread(target=call) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 40
    assert all(other == expected for other in found)


def test_the_gil_is_free_during_the_computation() -> None:
    """Another Python thread runs in the middle third of a call, which one that held the GIL to its
    end would not let it do. A busy machine may need several calls to show it.
    """
    q = np.ones((1, 2048, 4, 64), np.float32)
    moments: list[float] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            moments.append(time.perf_counter())
            time.sleep(0)

    def runs_in_the_middle() -> bool:
        moments.clear()
        start = time.perf_counter()
        fa.attention(q, q, q)
        end = time.perf_counter()
        third = (end - start) / 3
        return any(start + third < moment < end - third for moment in moments)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert any(runs_in_the_middle() for _ in range(50))
    finally:
        stop.set()
        watcher.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")  # JAX's, if a test here has used it
def test_fork_after_use() -> None:
    """A child computes what its parent does. No GPU survives a fork: there the child is told so."""
    arrays = problem()
    expected = results(arrays)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            same = results(arrays) == expected
        except RuntimeError as error:
            same = chosen_backend() == "metal" and "was forked from one that uses" in str(error)
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert results(arrays) == expected


def test_exit_is_clean() -> None:
    """No leak report of the binding and no crash, after use, after errors, with helper threads."""
    code = (
        "import numpy as np, flashattn as fa\n"
        "q = np.ones((2, 300, 2, 16), np.float32)\n"
        "kept = fa.attention_forward(q, q, q)\n"
        "fa.attention_backward(q, q, q, q, *kept, causal=True)\n"
        "empty = fa.empty((3, 3))\n"
        "fa.show_config('dict')\n"
        "try: fa.attention(q, q, 3)\n"
        "except TypeError: pass\n"
        "import torch\n"
        "t = torch.ones(1, 4, 2, 8, requires_grad=True)\n"
        "fa.attention(t, t, t).sum().backward()\n"
    )
    finished = run_python(code, FLASHATTN_LEAK_WARNINGS="1")
    assert finished.stderr == ""


def test_import_leaves_floating_point_alone() -> None:
    code = (
        "import sys, threading, numpy as np, flashattn as fa\n"
        "def check():\n"
        "    assert sys.float_info.min / 2 != 0\n"
        "    assert np.float32(2 ** -140) / np.float32(2) != 0\n"
        "check()\n"
        "q = np.full((1, 100, 2, 16), 2.0 ** -130, np.float32)\n"
        "assert fa.attention(q, q, q).any()\n"
        "check()\n"
        "worker = threading.Thread(target=check); worker.start(); worker.join()\n"
    )
    assert run_python(code).stderr == ""


def test_environment_sets_threads_and_instruction_set() -> None:
    code = (
        "import flashattn as fa; print(fa.get_num_threads(), fa.show_config('dict')['cpu']['isa'])"
    )
    isas = fa.show_config("dict")["cpu"]["isas"]  # type: ignore[index]
    found = run_python(code, FLASHATTN_NUM_THREADS="3", FLASHATTN_CPU_ISA=isas[-1]).stdout.split()
    assert found == ["3", isas[-1]]
    with pytest.raises(subprocess.CalledProcessError) as error:
        run_python(code, FLASHATTN_CPU_ISA="abacus")
    assert "FLASHATTN_CPU_ISA" in error.value.stderr
