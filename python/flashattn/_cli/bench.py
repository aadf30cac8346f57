"""Forward and backward GFLOP/s here and, when torch is there, of its SDPA, and the ratio.

Each side runs in a process of its own and they alternate. benchmarks/cpu_vs_peers.py in the source
tree is the thorough form, with more competitors.
"""

from __future__ import annotations

import importlib.util
import statistics
from typing import TYPE_CHECKING, Any

import flashattn as fa
from flashattn._cli.child import run_child
from flashattn._cli.problems import flops, numpy_dtype
from flashattn._cli.progress import progress

if TYPE_CHECKING:
    import argparse

_SHAPES = ((1, 512, 8, 64), (1, 2048, 8, 64), (1, 2048, 8, 128))


def _shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if len(sizes) != 4 or min(sizes) < 1:
        raise ValueError
    return sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which problems, how often."""
    _shape.__name__ = "batch,seqlen,heads,head_dim"  # what argparse calls a wrong one
    parser.add_argument("--shape", type=_shape, action="append", metavar="B,T,H,D")
    parser.add_argument("--dtype", action="append", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--threads", type=int, default=fa.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3, help="alternations of the two sides")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each cell and round")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """{"threads", "sides", "cells": [{shape, dtype, causal, backward, gflops per side, ratio}]}."""
    if "bfloat16" in (arguments.dtype or ()) and numpy_dtype("bfloat16") is None:
        raise SystemExit("bench: bfloat16 needs the package ml_dtypes")
    cells = [
        {"shape": shape, "dtype": dtype, "causal": causal, "backward": backward}
        for dtype in arguments.dtype or ["float32"]
        for shape in arguments.shape or _SHAPES
        for causal in (False, True)
        for backward in (False, True)
    ]
    sides = ["flashattn"]
    if importlib.util.find_spec("torch") is not None:
        sides.append("torch")
    times: dict[str, list[list[float]]] = {side: [[] for _ in cells] for side in sides}
    request = {"threads": arguments.threads, "seconds": arguments.seconds, "cells": cells}
    for side in progress(sides * arguments.rounds, "bench"):
        answer = run_child("flashattn._cli.sides", {**request, "side": side})
        if "error" in answer:
            raise SystemExit(f"bench: {side} did not finish: {answer['error']}")
        for index, measured in enumerate(answer["times"]):
            times[side][index].append(measured["wall"])
    for index, cell in enumerate(cells):
        work = flops(cell["shape"], cell["causal"], cell["backward"])
        cell["gflops"] = {
            side: work / statistics.median(times[side][index]) * 1e-9 for side in sides
        }
        if "torch" in sides:
            cell["ratio"] = cell["gflops"]["flashattn"] / cell["gflops"]["torch"]
    return {"threads": arguments.threads, "sides": sides, "cells": cells}


def lines(result: dict[str, Any]) -> list[str]:
    """A table."""
    sides = result["sides"]
    text = [
        f"wall time, {result['threads']} threads, GFLOP/s",
        f"{'pass':<9}{'dtype':<10}{'B,T,H,D':<16}{'mask':<8}"
        + "".join(f"{side:>11}" for side in sides)
        + ("      ratio" if "torch" in sides else ""),
    ]
    for cell in result["cells"]:
        text.append(
            f"{'backward' if cell['backward'] else 'forward':<9}{cell['dtype']:<10}"
            f"{','.join(map(str, cell['shape'])):<16}{'causal' if cell['causal'] else 'full':<8}"
            + "".join(f"{cell['gflops'][side]:11.1f}" for side in sides)
            + (f"{cell['ratio']:11.2f}" if "ratio" in cell else "")
        )
    return text
