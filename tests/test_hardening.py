"""Short runs of what `nox -s fuzz` and `nox -s soak` do for minutes; and memory that runs out."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def _run(*command: str, timeout: float = 240.0) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])},
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout


def test_hostile_arguments_for_a_while() -> None:
    printed = _run(str(HERE / "fuzz_binding.py"), "--seconds", "20")
    for outcome in ("a result", "TypeError", "ValueError"):
        assert outcome in printed


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_mixed_calls_for_a_while() -> None:
    _run(str(HERE / "soak.py"), "--seconds", "12")


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_memory_that_runs_out_is_a_memory_error() -> None:
    """Of results, and of what a call needs meanwhile; the next call works. Every single request
    that the library makes: tests/cpp/allocations.
    """
    _run(
        "-c",
        textwrap.dedent("""
        import resource
        import numpy as np, flashattn as fa

        fa.set_num_threads(1)
        x = np.random.default_rng(0).standard_normal((1, 30000, 4, 64)).astype(np.float32)
        few = x[:, :50]
        expected = fa.attention(few, few, few, backend="cpu")
        out, lse = np.empty_like(x), np.empty((1, 4, 30000), np.float32)
        with open("/proc/self/statm") as text:
            used = int(text.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), hard))
        failed = 0
        for call in (
            lambda: fa.attention(x, x, x, window=(9, 9), backend="cpu"),
            lambda: fa.attention(x, x, x, window=(9, 9), out=(out, lse), backend="cpu"),
        ):
            try:
                call()
            except MemoryError as error:
                failed += 1
                assert "memory" in str(error), error
        assert failed == 2, failed
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        np.testing.assert_array_equal(fa.attention(few, few, few, backend="cpu"), expected)
    """),
    )
