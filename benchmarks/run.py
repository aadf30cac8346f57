"""Attention against its peers: every suite, every peer that is installed, one way of measuring.

    python benchmarks/run.py                                   # the bars of the CPU design
    python benchmarks/run.py --suite features scaling          # see cells.py
    python benchmarks/run.py --quick                           # a minute, to see that it works
    python benchmarks/run.py --passes forward --dtypes float32 --peers torch jax

Each side runs in a process of its own on the cores that the cell has, and the sides take turns in
each round. Cells of one thread are compared by processor time, which other processes disturb least,
the others by wall time. What counts is the median over rounds; the JSON has the spread and the
machine's facts. benchmarks/plot.py draws the results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import machine
from bars import bars_of, summaries
from cells import DTYPES, PASSES, SUITE_PEERS, SUITES, Cell, all_cores, threads_of, work_of
from peers import SIDES

PEERS = tuple(side for side in SIDES if side != "flashattn")
_QUICK_WORK = 2e9  # operations or bytes that a cell of a quick run may have


class Side:
    """A competitor's process."""

    def __init__(self, name: str, cores: int) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peers.py")), name, str(cores)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request, one answer; {"skip": ...} when the process is gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        result: dict[str, Any] = json.loads(line) if line else {"skip": "the process ended"}
        return result

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def run_cell(cell: Cell, sides: list[Side], rounds: int, seconds: float) -> dict[str, Any]:
    """The cell with each side's rate (operations or bytes per second), the peak, and verdicts."""
    answers = {side.name: side.ask(cell=cell) for side in sides}
    skipped = {name: answer["skip"] for name, answer in answers.items() if "skip" in answer}
    if "flashattn" in skipped:
        raise SystemExit(f"{cell}: {skipped['flashattn']}")
    ready = [side for side in sides if side.name not in skipped]
    times: dict[str, list[float]] = {side.name: [] for side in ready}
    peaks: list[float] = []
    clock = "cpu" if threads_of(cell) == 1 else "wall"
    for _ in range(rounds):
        for side in ready:
            if side.name == "flashattn":
                kind = "bandwidth" if cell["pass"] == "decode" else cell["dtype"]
                peaks.append(side.ask(peak=kind)["peak"])
            answer = side.ask(seconds=seconds)
            if clock in answer:
                times[side.name].append(answer[clock])
    found = {name: spread(work_of(cell), each) for name, each in times.items() if each}
    rates = {name: each["median"] for name, each in found.items()}
    cores = 1 if cell["pass"] == "decode" else threads_of(cell)
    peak = statistics.median(peaks) * cores
    result = {**cell, "clock": clock, "rates": rates, "spread": found, "peak": peak}
    result["skipped"] = skipped
    result["fraction"] = rates["flashattn"] / peak
    result["ratios"] = {
        name: rates["flashattn"] / rate for name, rate in rates.items() if name != "flashattn"
    }
    return result


def spread(work: float, seconds: list[float]) -> dict[str, float]:
    """Median, least and largest rate over the rounds."""
    rates = [work / each for each in seconds]
    return {"median": work / statistics.median(seconds), "low": min(rates), "high": max(rates)}


def line_of(cell: dict[str, Any], names: list[str]) -> str:
    mask = "causal" if cell["causal"] else "full"
    mask = f"w{cell['window']}" if "window" in cell else mask
    rates = "".join(
        f"{cell['rates'][side] * 1e-9:10.1f}" if side in cell["rates"] else f"{'-':>10}"
        for side in names
    )
    shape = ",".join(map(str, cell["shape"]))
    more = f"/{cell['kv_heads']}" if "kv_heads" in cell else ""
    bars = "  ".join(_bar_text(name, bar) for name, bar in cell.get("bars", {}).items())
    return (
        f"{cell['pass']:<9}{cell['dtype']:<9}{mask:<7}{shape + more:<17}{threads_of(cell):>2}"
        f"{rates}{cell['fraction']:7.0%}  {bars}"
    )


def _bar_text(name: str, bar: dict[str, Any]) -> str:
    missed = "" if bar["met"] else f" < {bar['bar']:g} MISSED"
    return f"{name} {bar['reached']:.2f}{missed}"


def run_suite(suite: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All cells of a suite, with bars where it has them."""
    cells = SUITES[suite](arguments.passes, arguments.dtypes)
    for cell in cells:
        cell.setdefault("threads", arguments.threads)
    if arguments.quick:
        cells = [cell for cell in cells if work_of(cell) <= _QUICK_WORK]
    peers = SUITE_PEERS[suite] if arguments.peers is None else arguments.peers
    names = ["flashattn", *peers]
    print(f"\n{suite}: GFLOP/s (decode: GB/s), {arguments.rounds} rounds; fraction of peak; bars")
    header = "".join(f"{side:>10.9}" for side in names)
    print(f"{'pass':<9}{'dtype':<9}{'mask':<7}{'shape':<17} n{header}   peak")
    results: list[dict[str, Any]] = []
    for threads in sorted({threads_of(cell) for cell in cells}):
        sides = [Side(name, threads) for name in names]
        for cell in cells:
            if threads_of(cell) != threads:
                continue
            result = run_cell(cell, sides, arguments.rounds, arguments.seconds)
            if suite == "cpu_vs_peers" and threads == 1:
                result["bars"] = bars_of(result)
            results.append(result)
            print(line_of(result, names), flush=True)
        for side in sides:
            side.close()
    skipped = {name: reason for cell in results for name, reason in cell["skipped"].items()}
    for name, reason in skipped.items():
        print(f"{name} was left out of some cells: {reason}")
    return {"cells": results, "means": summaries(results)}


def print_summary(result: dict[str, Any]) -> None:
    if result["means"]:
        print("\ngeometric mean of the ratios to torch")
    for row in result["means"]:
        mask = "causal" if row["causal"] else "full"
        verdict = "met" if row["met"] else "MISSED"
        mean = f"{row['geometric_mean']:6.2f} (bar {row['bar']:g}) {verdict}"
        print(f"{row['pass']:<9}{row['dtype']:<9}{mask:<7}{mean}")
    bars = [bar for cell in result["cells"] for bar in cell.get("bars", {}).values()]
    if bars:
        met = sum(bar["met"] for bar in bars)
        means = sum(row["met"] for row in result["means"])
        print(
            f"\n{met} of {len(bars)} bars met in the cells; "
            f"{means} of {len(result['means'])} of the means"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=["cpu_vs_peers"])
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="default: see cells.py")
    parser.add_argument("--threads", type=int, default=1, help=f"of all, {all_cores()} here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.2, help="for each side and round")
    parser.add_argument("--quick", action="store_true", help="small cells, one short round")
    parser.add_argument("--output", type=Path, default=machine.RESULTS, help="folder of the JSON")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.02
    for suite in arguments.suite:
        result = run_suite(suite, arguments)
        print_summary(result)
        name = suite if arguments.threads == 1 else f"{suite}_{arguments.threads}_threads"
        if arguments.quick:
            name = f"quick_{name}"
        print("written to", machine.write(name, result, arguments.output))


if __name__ == "__main__":
    main()
