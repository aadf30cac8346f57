"""CPU attention against torch, OpenVINO and ONNX Runtime: one thread, processor time, the bars.

    python benchmarks/cpu_vs_peers.py                          # everything, some ten minutes
    python benchmarks/cpu_vs_peers.py --passes forward --dtypes float32 --rounds 1

Prints a line for each cell and a summary of the bars; writes results/cpu_vs_peers.json.
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
from cells import (
    DECODE_BAR,
    DTYPES,
    PEAK_SEQLEN,
    RUNTIME_BARS,
    TORCH_BARS,
    Cell,
    all_cells,
    geometric_mean,
    torch_bar,
    work_of,
)

PEERS = ("torch", "openvino", "onnxruntime")


class Side:
    """A competitor's process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peers.py")), name],
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
    ready = [side for side in sides if "skip" not in side.ask(cell=cell)]
    times: dict[str, list[float]] = {side.name: [] for side in ready}
    peaks: list[float] = []
    for _ in range(rounds):
        for side in ready:
            if side.name == "flashattn":
                kind = "bandwidth" if cell["pass"] == "decode" else cell["dtype"]
                peaks.append(side.ask(peak=kind)["peak"])
            answer = side.ask(seconds=seconds)
            if "cpu" in answer:
                times[side.name].append(answer["cpu"])
    rates = {
        name: work_of(cell) / statistics.median(found) for name, found in times.items() if found
    }
    peak = statistics.median(peaks)
    result = {**cell, "rates": rates, "peak": peak, "fraction": rates["flashattn"] / peak}
    result["ratios"] = {
        name: rates["flashattn"] / rate for name, rate in rates.items() if name != "flashattn"
    }
    result["bars"] = bars_of(result)
    return result


def bars_of(cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the cell must reach, what it reached, and whether that is enough."""
    bars: dict[str, tuple[float, float]] = {}
    ratios = cell["ratios"]
    if cell["pass"] == "decode":
        bars["bandwidth"] = (DECODE_BAR, cell["fraction"])
    else:
        if "torch" in ratios:
            bars["torch"] = (torch_bar(cell), ratios["torch"])
        if cell["shape"][2] >= PEAK_SEQLEN:
            asked = TORCH_BARS[cell["pass"], cell["dtype"]][cell["causal"]][2]
            bars["peak"] = (asked, cell["fraction"])
    if cell["pass"] != "backward":
        least = RUNTIME_BARS[cell["causal"]]
        bars |= {name: (least, ratio) for name, ratio in ratios.items() if name != "torch"}
    return {
        name: {"bar": bar, "reached": got, "met": got >= bar} for name, (bar, got) in bars.items()
    }


def summaries(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each pass, dtype and mask: the geometric mean of the ratios to torch, and its bar."""
    rows = []
    for (name, dtype), per_mask in TORCH_BARS.items():
        for causal, (_, bar, _) in per_mask.items():
            ratios = [
                cell["ratios"]["torch"]
                for cell in cells
                if (cell["pass"], cell["dtype"], cell["causal"]) == (name, dtype, causal)
                and "torch" in cell["ratios"]
            ]
            if ratios:
                mean = geometric_mean(ratios)
                row = {"pass": name, "dtype": dtype, "causal": causal, "geometric_mean": mean}
                rows.append({**row, "bar": bar, "met": mean >= bar})
    return rows


def line_of(cell: dict[str, Any]) -> str:
    mask = "causal" if cell["causal"] else "full"
    rates = "".join(
        f"{cell['rates'][side] * 1e-9:9.1f}" if side in cell["rates"] else "        -"
        for side in ("flashattn", *PEERS)
    )
    bars = "  ".join(bar_text(name, bar) for name, bar in cell["bars"].items())
    shape = ",".join(map(str, cell["shape"]))
    return (
        f"{cell['pass']:<9}{cell['dtype']:<9}{mask:<7}{shape:<14}{rates}"
        f"{cell['fraction']:7.0%}  {bars}"
    )


def bar_text(name: str, bar: dict[str, Any]) -> str:
    missed = "" if bar["met"] else f" < {bar['bar']:g} MISSED"
    return f"{name} {bar['reached']:.2f}{missed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    passes = ("forward", "backward", "decode")
    parser.add_argument("--passes", nargs="+", choices=passes, default=list(passes))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.2, help="for each side and round")
    parser.add_argument("--name", default="cpu_vs_peers", help="of the result file")
    arguments = parser.parse_args()
    sides = [Side(name) for name in ("flashattn", *arguments.peers)]
    print("GFLOP/s (decode: GB/s) of one thread's processor time; fraction of peak; bars")
    header = "".join(f"{side:>9.9}" for side in ("flashattn", *PEERS))
    print(f"{'pass':<9}{'dtype':<9}{'mask':<7}{'shape':<14}{header}   peak")
    results = []
    for cell in all_cells(arguments.passes, arguments.dtypes):
        results.append(run_cell(cell, sides, arguments.rounds, arguments.seconds))
        print(line_of(results[-1]), flush=True)
    for side in sides:
        side.close()
    means = summaries(results)
    print("\ngeometric mean of the ratios to torch")
    for row in means:
        mask = "causal" if row["causal"] else "full"
        verdict = "met" if row["met"] else "MISSED"
        print(
            f"{row['pass']:<9}{row['dtype']:<9}{mask:<7}{row['geometric_mean']:6.2f} "
            f"(bar {row['bar']:g}) {verdict}"
        )
    missed = sum(not bar["met"] for cell in results for bar in cell["bars"].values())
    total = sum(len(cell["bars"]) for cell in results)
    print(
        f"\n{total - missed} of {total} bars met in the cells; "
        f"{sum(row['met'] for row in means)} of {len(means)} of the means"
    )
    print("written to", machine.write(arguments.name, {"cells": results, "means": means}).name)


if __name__ == "__main__":
    main()
