"""Ctrl-C during a long call, and other signals: handlers run meanwhile, and what they raise ends
the call. Each case in a process of its own. The CPU backend's alone: a GPU's work is not taken
back.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")

# A call of some 20 s or more of one core, unless it is ended 0.3 s after its start.
BEGIN = """
    import os, signal, sys, threading, time
    import numpy as np, flashattn as fa

    which, threads = sys.argv[1], int(sys.argv[2])
    fa.set_num_threads(threads)
    rng = np.random.default_rng(0)
    rows = 32768
    x = rng.standard_normal((1, rows, 8, 64), np.float32)
    small = x[:, :100]
    expected = fa.attention(small, small, small, backend="cpu")
    lse = np.zeros((1, 8, rows), np.float32)
    calls = {
        "forward": lambda: fa.attention(x, x, x, backend="cpu"),
        "modified": lambda: fa.attention(x, x, x, softcap=3.0, backend="cpu"),
        "backward": lambda: fa.attention_backward(x, x, x, x, x, lse, backend="cpu"),
        "mask_gradient": lambda: fa.attention_backward(
            x, x, x, x, x, lse, mask=np.zeros(rows, np.float32), backend="cpu"
        ),
        "packed": lambda: fa.attention_varlen(
            x[0], x[0], x[0], [0, 99, rows], [0, 50, rows], backend="cpu"
        ),
    }
    sent = []

    def send():
        sent.append((time.monotonic(), time.process_time()))
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.3, send)

    def late():
        # Of the wall, or of the processors where others keep them from this process.
        wall, processor = sent[0]
        return min(time.monotonic() - wall, (time.process_time() - processor) / threads)
"""
INTERRUPTED = """
    timer.start()
    try:
        calls[which]()
    except KeyboardInterrupt:
        seconds = late()
    else:
        raise SystemExit("the call was not interrupted")
    np.testing.assert_array_equal(fa.attention(small, small, small, backend="cpu"), expected)
    print(seconds)
"""
HANDLED = """
    class Enough(Exception):
        pass

    def handler(number, frame):
        raise Enough

    signal.signal(signal.SIGINT, handler)
    timer.start()
    try:
        calls[which]()
    except Enough:
        print(late())
"""
IGNORED = """
    seen = []
    signal.signal(signal.SIGALRM, lambda number, frame: seen.append(time.monotonic()))
    middle = x[:, :3072]
    whole = fa.attention(middle, middle, middle, backend="cpu")
    signal.setitimer(signal.ITIMER_REAL, 0.005)
    again = fa.attention(middle, middle, middle, backend="cpu")
    end = time.monotonic()
    np.testing.assert_array_equal(again, whole)
    assert len(seen) == 1 and seen[0] < end
    print(0.0)
"""
IN_A_THREAD = """
    ended = []

    def work():
        middle = x[:, :3072]
        ended.append(fa.attention(middle, middle, middle, backend="cpu").shape)

    thread = threading.Thread(target=work)
    thread.start()
    timer = threading.Timer(0.05, send)
    timer.start()
    interrupted = False
    while thread.is_alive() or not interrupted:
        try:
            time.sleep(0.01)
        except KeyboardInterrupt:
            interrupted = True
    assert ended == [(1, 3072, 8, 64)]
    print(0.0)
"""


def _late(code: str, which: str, threads: int) -> float:
    """Runs BEGIN and `code`; what it prints, in seconds."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BEGIN) + textwrap.dedent(code), which, str(threads)],
        capture_output=True,
        text=True,
        timeout=100,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return float(done.stdout)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("which", ["forward", "modified", "backward", "mask_gradient", "packed"])
def test_ctrl_c_ends_a_call_within_a_second(which: str, threads: int) -> None:
    assert _late(INTERRUPTED, which, threads) < 1.0


def test_what_a_handler_raises_comes_out() -> None:
    assert _late(HANDLED, "forward", 2) < 1.0


@pytest.mark.parametrize("code", [IGNORED, IN_A_THREAD], ids=["main thread", "another thread"])
def test_a_signal_that_ends_nothing_changes_nothing(code: str) -> None:
    _late(code, "forward", 1)
