"""Threads and instruction sets of a process: environment, affinity, functions, many callers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import flashattn as fa
import numpy as np
import pytest


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a fresh interpreter."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FLASHATTN_")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def value_of(expression: str, **environment: str) -> str:
    done = python(f"import flashattn as fa; print({expression})", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SMALL_CALL = """
    import numpy as np, flashattn as fa
    q = np.ones((1, 4, 2, 8), np.float32)
    fa.attention(q, q, q, backend="cpu")
"""


def test_the_environment_sets_the_number_of_threads() -> None:
    assert value_of("fa.get_num_threads()", FLASHATTN_NUM_THREADS="7") == "7"
    assert value_of("fa.get_num_threads()", FLASHATTN_NUM_THREADS="") == value_of(
        "fa.get_num_threads()"
    )


@pytest.mark.parametrize("text", ["0", "-2", "two", "3x", "1.5", "100000"])
def test_a_wrong_number_of_threads_is_an_error_that_names_it(text: str) -> None:
    done = python(SMALL_CALL, FLASHATTN_NUM_THREADS=text)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError:")
    assert "FLASHATTN_NUM_THREADS" in last
    assert text in last


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks here")
def test_the_affinity_mask_is_respected() -> None:
    one = min(os.sched_getaffinity(0))
    done = python(
        f"""
        import os
        os.sched_setaffinity(0, {{{one}}})
        import flashattn as fa
        print(fa.get_num_threads())
        """
    )
    assert done.stdout.strip() == "1", done.stderr


def test_set_num_threads_checks_its_argument() -> None:
    before = fa.get_num_threads()
    for wrong in (0, -1, 10**6):
        with pytest.raises(ValueError, match="threads"):
            fa.set_num_threads(wrong)
    assert fa.get_num_threads() == before


def test_the_environment_forces_an_instruction_set() -> None:
    from flashattn import _core

    for name in _core.supported_isas():
        code = "__import__('flashattn._core')._core.active_isa()"
        assert value_of(code, FLASHATTN_CPU_ISA=name) == name


def test_an_unknown_instruction_set_is_an_error_that_names_the_choices() -> None:
    from flashattn import _core

    done = python(SMALL_CALL, FLASHATTN_CPU_ISA="sse9")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError:")
    assert all(word in last for word in ["FLASHATTN_CPU_ISA", "sse9", *_core.supported_isas()])


@pytest.mark.parametrize("seqlen_q", [1, 300], ids=["decode", "forward"])
def test_many_callers_at_once_get_the_bits_of_one(seqlen_q: int) -> None:
    """Calls from many threads, while another one changes the number of threads."""
    rng = np.random.default_rng(5)
    q = rng.standard_normal((2, seqlen_q, 6, 40), dtype=np.float32)
    k, v = (rng.standard_normal((2, 700, 2, 40), dtype=np.float32) for _ in range(2))
    dout = rng.standard_normal(q.shape, dtype=np.float32)

    def call(_: int) -> list[np.ndarray]:
        out, lse = fa.attention_forward(q, k, v, causal=True, backend="cpu")
        grads = fa.attention_backward(dout, q, k, v, out, lse, causal=True, backend="cpu")
        return [out, lse, grads.dq, grads.dk, grads.dv]

    before = fa.get_num_threads()
    try:
        expected = call(0)
        with ThreadPoolExecutor(8) as callers:
            results = callers.map(call, range(24))
            for threads in (1, 2, 5, 3):
                fa.set_num_threads(threads)
            for result in results:
                for got, want in zip(result, expected, strict=True):
                    np.testing.assert_array_equal(got, want)
    finally:
        fa.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork_while_other_threads_compute() -> None:
    """The child inherits the pool's locks in whatever state they were."""
    done = python(
        """
        import os, signal, threading
        import numpy as np, flashattn as fa
        fa.set_num_threads(3)
        q = np.random.default_rng(0).standard_normal((1, 200, 4, 32), dtype=np.float32)
        want = fa.attention(q, q, q, causal=True)
        stop = threading.Event()
        def work():
            while not stop.is_set():
                fa.attention(q, q, q, causal=True)
        threads = [threading.Thread(target=work) for _ in range(3)]
        for t in threads: t.start()
        failed = 0
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                same = np.array_equal(fa.attention(q, q, q, causal=True), want)
                os._exit(0 if same else 1)
            failed += os.waitpid(child, 0)[1] != 0
        stop.set()
        for t in threads: t.join()
        print(failed)
        """
    )
    assert done.stdout.strip() == "0", done.stderr
