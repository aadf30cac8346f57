"""What each option costs against the plain call: one thread, processor time, goals.

    python benchmarks/option_cost.py                              # some minutes
    python benchmarks/option_cost.py --passes forward --dtypes float32

Every option runs in a process of its own, and they take turns. Backward is dq, dk and dv alone, and
with "+gradient" behind its name the option's own too. Prints a line for each and writes
results/option_cost.json.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import machine
import ml_dtypes
import numpy as np

SHAPE = (1, 8, 2048, 64)  # batch, heads, seqlen, head_dim
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
# At most so many times the plain call; forward. Windows: see WINDOWS.
GOALS = {
    "window_full": 1.25,
    "alibi": 1.25,
    "softcap": 1.5,
    "mask_additive": 1.5,
    "dropout": 2.0,
}
# Keys that a row sees; the cost has to follow the number of tiles that holds them.
WINDOWS = (64, 256, 1024)


def options_of(name: str, rng: np.random.Generator) -> dict[str, Any]:
    """The keyword arguments that a named option stands for."""
    heads, seqlen = SHAPE[1:3]
    name = name.removesuffix(GRADIENT)
    if name.startswith("window_"):
        width = name.removeprefix("window_")
        # One short of the whole, which would be recognised and dropped.
        return {"window": (seqlen - 2, seqlen - 2) if width == "full" else (int(width) - 1, 0)}
    table: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": dict,
        "alibi": lambda: {"alibi_slopes": np.full(heads, 0.1, np.float32)},
        "softcap": lambda: {"softcap": 30.0},
        "sinks": lambda: {"sinks": np.zeros(heads, np.float32)},
        "mask_additive": lambda: {
            "mask": rng.standard_normal((1, 1, seqlen, seqlen)).astype(np.float32)
        },
        "mask_bool": lambda: {"mask": rng.random((1, 1, seqlen, seqlen)) < 0.7},
        "mask_bool_causal": lambda: {"mask": np.tri(seqlen, dtype=bool)},
        "mask_keys": lambda: {"mask": rng.random((1, 1, 1, seqlen)) < 0.9},
        "mask_keys_additive": lambda: {
            "mask": rng.standard_normal((1, heads, 1, seqlen)).astype(np.float32)
        },
        "dropout": lambda: {"dropout_p": 0.1, "dropout_seed": 3},
    }
    return table[name]()


GRADIENT = "+gradient"
NAMES = (
    "plain",
    "window_full",
    *(f"window_{width}" for width in WINDOWS),
    "alibi",
    "softcap",
    "sinks",
    "mask_additive",
    "mask_bool",
    "mask_bool_causal",
    "mask_keys",
    "mask_keys_additive",
    "dropout",
)
# Those whose input has a gradient; dmask of mask_keys_additive is a sum over rows.
WITH_GRADIENT = ("alibi", "sinks", "mask_additive", "mask_keys_additive")


def names_of(which: str) -> tuple[str, ...]:
    """The options of a pass."""
    if which == "forward":
        return NAMES
    return (*NAMES, *(name + GRADIENT for name in WITH_GRADIENT))


def serve(name: str, dtype: str, which: str) -> None:
    """A child: for each line on stdin, one call and its processor time."""
    import flashattn as fa

    fa.set_num_threads(1)
    rng = np.random.default_rng(0)
    batch, heads, seqlen, head_dim = SHAPE
    query, key, value, dout = (
        rng.standard_normal((batch, seqlen, heads, head_dim)).astype(DTYPES[dtype])
        for _ in range(4)
    )
    options: dict[str, Any] = {"backend": "cpu", **options_of(name, rng)}

    def forward() -> tuple[Any, Any]:
        result: tuple[Any, Any] = fa.attention_forward(query, key, value, **options)
        return result

    out, lse = forward()
    call: Callable[[], Any] = forward
    if which == "backward":
        from flashattn._api import gradients
        from flashattn._arrays import NUMPY
        from flashattn._options import parse

        parsed = parse("attention_backward", options)
        wanted = (True,) * 3 + (name.endswith(GRADIENT),) * 3
        inputs = (query, key, value, parsed.mask, parsed.alibi_slopes, parsed.sinks)

        def call() -> Any:
            return gradients(NUMPY, parsed, dout, None, out, lse, wanted, *inputs)

        call()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.process_time()
        call()
        print(time.process_time() - start, flush=True)


class Child:
    """The process of one option."""

    def __init__(self, name: str, dtype: str, which: str) -> None:
        command = [sys.executable, __file__, "--serve", name, dtype, which]
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.answer()

    def answer(self) -> str:
        """The child's next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} ended")
        return line

    def seconds(self) -> float:
        """Of one call."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.answer())

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def verdict(row: dict[str, Any]) -> str:
    if row["goal"] is None:
        return ""
    return f"  goal {row['goal']:g} {'met' if row['met'] else 'MISSED'}"


def measure(dtype: str, which: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each option."""
    children = [Child(name, dtype, which) for name in names_of(which)]
    times: dict[str, list[float]] = {child.name: [] for child in children}
    for _ in range(rounds):
        for child in children:
            times[child.name].append(child.seconds())
    for child in children:
        child.close()
    plain = statistics.median(times["plain"])
    rows = []
    for name in times:
        ratio = statistics.median(times[name]) / plain
        goal = GOALS.get(name) if which == "forward" else None
        row: dict[str, Any] = {"pass": which, "dtype": dtype, "option": name, "ratio": ratio}
        row |= {
            "seconds": ratio * plain,
            "goal": goal,
            "met": None if goal is None else ratio <= goal,
        }
        rows.append(row)
        print(f"{which:<10}{dtype:<10}{name:<28}{ratio:7.3f}{verdict(row)}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--passes", nargs="+", default=["forward", "backward"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--serve", nargs=3, metavar=("OPTION", "DTYPE", "PASS"))
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
        return
    rows: list[dict[str, Any]] = []
    for which in arguments.passes:
        for dtype in arguments.dtypes:
            rows += measure(dtype, which, arguments.rounds)
    result = {"shape": SHAPE, "rows": rows}
    print("written to", machine.write("option_cost", result).name)


if __name__ == "__main__":
    main()
