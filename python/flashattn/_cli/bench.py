"""Forward and backward GFLOP/s here and in every other framework that is installed, and the ratios.

The others are torch, JAX, MLX and ONNX Runtime, each by its own attention for the CPU. Each side
runs in a process of its own and they alternate; a framework that lacks a pass or a dtype leaves a
gap, and one that fails is named below the table. The exit status is 1 when this package's own side
fails. benchmarks/run.py in the source tree is the thorough form.
"""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flashattn as fa
from flashattn._cli._peers import SIDES
from flashattn._cli.child import run_child
from flashattn._cli.plot import plot_bench
from flashattn._cli.problems import flops, numpy_dtype
from flashattn._cli.progress import progress

if TYPE_CHECKING:
    import argparse

_OURS = "flashattn"
# name: shapes (batch, seqlen, heads, head_dim), alternations of the sides, seconds for each cell.
_SUITES: dict[str, tuple[tuple[tuple[int, ...], ...], int, float]] = {
    "quick": (((1, 512, 8, 64), (1, 512, 8, 128)), 1, 0.1),
    "full": (((1, 512, 8, 64), (1, 2048, 8, 64), (1, 2048, 8, 128)), 3, 0.2),
}


def _shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if len(sizes) != 4 or min(sizes) < 1:
        raise ValueError
    return sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which problems, how often, against whom."""
    _shape.__name__ = "batch,seqlen,heads,head_dim"  # what argparse calls a wrong one
    suites = "quick takes less than a minute; default: full"
    parser.add_argument("--suite", choices=tuple(_SUITES), default="full", help=suites)
    parser.add_argument("--shape", type=_shape, action="append", metavar="B,T,H,D")
    parser.add_argument("--dtype", action="append", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--threads", type=int, default=fa.get_num_threads())
    parser.add_argument("--rounds", type=int, help="alternations of the sides")
    parser.add_argument("--seconds", type=float, help="for each cell and round")
    parser.add_argument(
        "--against", action="append", choices=tuple(SIDES), help="default: all that are installed"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="bars, as SVG or what FILE says")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """{"threads", "suite", "sides", "versions", "cells", "failed", "plot", "right"}.

    Each of cells has shape, dtype, causal, backward, gflops {side: number or None}, and ratios
    {other side: ours over theirs}.
    """
    if "bfloat16" in (arguments.dtype or ()) and numpy_dtype("bfloat16") is None:
        raise SystemExit("bench: bfloat16 needs the package ml_dtypes")
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("bench: --plot needs the package matplotlib")
    shapes, rounds, seconds = _SUITES[arguments.suite]
    cells: list[dict[str, Any]] = [
        {"shape": shape, "dtype": dtype, "causal": causal, "backward": backward}
        for dtype in arguments.dtype or ["float32"]
        for shape in arguments.shape or shapes
        for causal in (False, True)
        for backward in (False, True)
    ]
    request = {
        "threads": arguments.threads,
        "seconds": seconds if arguments.seconds is None else arguments.seconds,
        "cells": [dict(cell) for cell in cells],
    }
    sides = [_OURS, *_peers(arguments.against)]
    rounds = rounds if arguments.rounds is None else arguments.rounds
    times, versions, failed = _measure(request, sides, rounds)
    sides = [side for side in sides if side not in failed]
    for index, cell in enumerate(cells):
        _fill(cell, {side: times[side][index] for side in sides})
    result: dict[str, Any] = {
        "threads": arguments.threads,
        "suite": arguments.suite,
        "sides": sides,
        "versions": versions,
        "cells": cells,
        "failed": failed,
        "plot": None,
        "right": _OURS in sides,
    }
    if arguments.plot is not None:
        result["plot"] = str(plot_bench(result, arguments.plot))
    return result


def _peers(named: list[str] | None) -> list[str]:
    """Those that are installed; one that was named and is not is an error."""
    installed = [
        name for name, side in SIDES.items() if importlib.util.find_spec(side.module) is not None
    ]
    missing = [name for name in named or () if name not in installed]
    if missing:
        raise SystemExit(f"bench: {', '.join(missing)} is not installed")
    return [name for name in installed if named is None or name in named]


def _measure(
    request: dict[str, Any], sides: list[str], rounds: int
) -> tuple[dict[str, list[list[float]]], dict[str, str], dict[str, str]]:
    """Wall seconds of every round for each side and cell; versions; the sides that failed."""
    times: dict[str, list[list[float]]] = {side: [[] for _ in request["cells"]] for side in sides}
    versions: dict[str, str] = {}
    failed: dict[str, str] = {}
    for side in progress(sides * rounds, "bench"):
        if side in failed:
            continue
        answer = run_child("flashattn._cli.sides", {**request, "side": side})
        if "error" in answer:
            failed[side] = answer["error"]
            continue
        versions[side] = answer["version"]
        for index, measured in enumerate(answer["times"]):
            if "wall" in measured:
                times[side][index].append(measured["wall"])
    return times, versions, failed


def _fill(cell: dict[str, Any], times: dict[str, list[float]]) -> None:
    work = flops(cell["shape"], cell["causal"], cell["backward"])
    speeds = {
        # A pass measured as a difference may come out as nothing in the noise of a small problem.
        side: work / statistics.median(took) * 1e-9
        if took and statistics.median(took) > 0
        else None
        for side, took in times.items()
    }
    ours = speeds.get(_OURS)
    cell["gflops"] = speeds
    cell["ratios"] = {
        side: ours / speed
        for side, speed in speeds.items()
        if side != _OURS and ours is not None and speed is not None
    }


def lines(result: dict[str, Any]) -> list[str]:
    """A table: GFLOP/s of each side, then how many times theirs ours is."""
    sides = result["sides"]
    others = [side for side in sides if side != _OURS]
    text = [
        f"wall time, {result['threads']} threads, GFLOP/s, and ours over theirs",
        f"{'pass':<9}{'dtype':<10}{'B,T,H,D':<16}{'mask':<8}"
        + "".join(f"{side:>12}" for side in sides)
        + "".join(f"{'/' + side:>13}" for side in others),
    ]
    for cell in result["cells"]:
        text.append(
            f"{'backward' if cell['backward'] else 'forward':<9}{cell['dtype']:<10}"
            f"{','.join(map(str, cell['shape'])):<16}{'causal' if cell['causal'] else 'full':<8}"
            + "".join(_number(cell["gflops"][side], 12, 1) for side in sides)
            + "".join(_number(cell["ratios"].get(side), 13, 2) for side in others)
        )
    text.append(", ".join(f"{side} {version}" for side, version in result["versions"].items()))
    text += [f"{side} did not finish: {reason}" for side, reason in result["failed"].items()]
    if result["plot"]:
        text.append(f"plot      {result['plot']}")
    return text


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"
