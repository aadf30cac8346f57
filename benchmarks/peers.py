"""One side of the comparison, in a process of its own: `python peers.py SIDE CORES`.

Answers one JSON line per JSON line. {"cell": ...} builds arrays and model and warms up, answering
{"first": seconds} or {"skip": reason}; {"seconds": s} runs it for about that long and answers the
median processor and wall time of a run; {"peak": kind} measures what the machine can do.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
from typing import Any

from sides.common import Call

# Where each side's function is.
SIDES = {
    "flashattn": "arrays",
    "torch": "pytorch",
    "torch_contiguous": "pytorch",
    "flex": "pytorch",
    "jax": "arrays",
    "mlx": "arrays",
    "openvino": "runtimes",
    "onnxruntime": "runtimes",
    "onnx_attention": "runtimes",
}
_SLOW_SECONDS = 2.0  # a run this long is not repeated


def build(side: str, cell: dict[str, Any]) -> Call:
    """The call to time."""
    module = importlib.import_module(f"sides.{SIDES[side]}")
    call: Call = getattr(module, side)(cell)
    return call


def measure(call: Call, seconds: float) -> dict[str, Any]:
    """Median processor and wall seconds of a run, over at least two unless a run is slow."""
    wall: list[float] = []
    cpu: list[float] = []
    end = time.perf_counter() + seconds
    while len(wall) < 2 or time.perf_counter() < end:
        start, start_cpu = time.perf_counter(), time.process_time()
        call()
        cpu.append(time.process_time() - start_cpu)
        wall.append(time.perf_counter() - start)
        if wall[-1] > _SLOW_SECONDS:
            break
    return {"cpu": statistics.median(cpu), "wall": statistics.median(wall), "runs": len(wall)}


def answer(request: dict[str, Any], side: str, current: list[Call]) -> dict[str, Any]:
    if "cell" in request:
        current.clear()  # the last cell's arrays
        try:
            current.append(build(side, request["cell"]))
            start = time.process_time()
            current[0]()
        except (NotImplementedError, ImportError) as reason:
            return {"skip": str(reason)}
        except Exception as failure:  # another framework's refusal, of any kind
            if side == "flashattn":
                raise
            return {"skip": f"{type(failure).__name__}: {failure}".partition("\n")[0]}
        return {"first": time.process_time() - start}
    if "peak" in request:
        from flashattn import _core

        if request["peak"] == "bandwidth":
            return {"peak": _core.measure_read_bandwidth(256 << 20)[1]}
        halves = _core.measure_bf16_dot_peak() if request["peak"] == "bfloat16" else 0.0
        return {"peak": halves or _core.measure_multiply_add_peak()}
    return measure(current[0], request["seconds"])


def keep_to(cores: int) -> None:
    """Not every framework can be told how many threads it has: the first `cores` cores are all."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def main() -> None:
    keep_to(int(sys.argv[2]))
    current: list[Call] = []
    # Libraries may print: keep standard output for answers.
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line), sys.argv[1], current)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
