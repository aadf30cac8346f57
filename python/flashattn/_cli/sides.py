"""One side of a speed comparison, timed in a process of its own.

`work` answers requests of `run_child`: it builds the arrays for each cell, warms up, and returns
the median time of a few runs. Both clocks are reported: wall time, and this process's processor
time, which other processes on the machine disturb least. `_peers` has the other frameworks' calls.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from flashattn._cli.problems import numpy_dtype, random_arrays

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[[], object]

_SLOW_SECONDS = 1.0  # runs that take so long together are not repeated


def work(request: dict[str, Any]) -> dict[str, Any]:
    """{"version", "times": [{"wall", "cpu"} in seconds or {"skipped": reason} for each cell]}.

    request: side (a key of `_peers.SIDES` or "flashattn"), threads, seconds (to spend on each
    cell), and cells, each with shape (batch, seqlen, heads, head_dim), dtype, causal, backward.
    """
    _keep_to_processors(request["threads"])
    build: Callable[[dict[str, Any]], Call]
    if request["side"] == "flashattn":
        import flashattn as fa

        version, build = fa.__version__, _flashattn_call
        fa.set_num_threads(request["threads"])
    else:
        from flashattn._cli import _peers

        peer = _peers.SIDES[request["side"]]
        version, build = peer.prepare(request["threads"]), peer.call
    return {
        "version": version,
        "times": [_timed(build, cell, request["seconds"]) for cell in request["cells"]],
    }


def _keep_to_processors(threads: int) -> None:
    """Not every framework can be told its threads, but each counts the processors that it may use.

    Comes before a framework is imported.
    """
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, allowed[:threads])


def _timed(build: Callable[[dict[str, Any]], Call], cell: dict[str, Any], seconds: float) -> Any:
    try:
        call = build(cell)
    except NotImplementedError as reason:
        return {"skipped": str(reason)}
    times = measure(call, seconds)
    less = getattr(call, "less", None)  # what the call does besides and cannot leave out
    if less is not None:
        times = {clock: times[clock] - took for clock, took in measure(less, seconds).items()}
    return times


def measure(call: Call, seconds: float) -> dict[str, float]:
    """Medians over about `seconds` of runs, at least three unless one is slow, after a first."""
    call()
    wall: list[float] = []
    cpu: list[float] = []
    end = time.perf_counter() + seconds
    while (len(wall) < 3 and sum(wall) < _SLOW_SECONDS) or time.perf_counter() < end:
        start, start_cpu = time.perf_counter(), time.process_time()
        call()
        cpu.append(time.process_time() - start_cpu)
        wall.append(time.perf_counter() - start)
    return {"wall": statistics.median(wall), "cpu": statistics.median(cpu)}


def _flashattn_call(cell: dict[str, Any]) -> Call:
    import flashattn as fa

    q, k, v, dout = random_arrays([tuple(cell["shape"])] * 4, numpy_dtype(cell["dtype"]))
    causal = cell["causal"]
    out, lse = fa.attention_forward(q, k, v, causal=causal)
    if cell["backward"]:
        return lambda: fa.attention_backward(dout, q, k, v, out, lse, causal=causal)
    return lambda: fa.attention_forward(q, k, v, causal=causal)
