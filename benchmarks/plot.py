"""Pictures of the results: `python benchmarks/plot.py [--results FOLDER] [--to FOLDER]`.

Draws what is there, as SVG: speed_against_torch.svg (means over the cells with bars),
throughput.svg (GFLOP/s against the sequence length, with the peak), decode.svg (GB/s against the
cache's length, with the read bandwidth), memory.svg (bytes above inputs and outputs against the
sequence length) and scaling.svg (time against sequence length, window, batch and threads). Needs
matplotlib, and results of run.py (suites cpu_vs_peers and scaling) and peak_memory.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
from cells import threads_of, work_of

COLORS = {"flashattn": "C0", "torch": "0.55"}
NAMES = {"torch": "torch SDPA", "torch_contiguous": "torch SDPA, contiguous", "naive": "O(T²) way"}
# The size that a series varies.
SIZES: dict[str, Callable[[dict[str, Any]], int]] = {
    "seqlen": lambda cell: int(cell["shape"][2]),
    "window": lambda cell: int(cell["window"]),
    "batch": lambda cell: int(cell["shape"][0]),
    "threads": threads_of,
    "decode": lambda cell: int(cell["shape"][2]),
}
LABELS = {"seqlen": "sequence length", "decode": "cache length", "window": "keys a row sees"}


def series_of(cells: list[dict[str, Any]], name: str, which: str) -> list[dict[str, Any]]:
    """The float32 cells of a series and pass, by rising size."""
    found = [
        c for c in cells if (c.get("series"), c["pass"], c["dtype"]) == (name, which, "float32")
    ]
    return sorted(found, key=SIZES[name])


def line(axes: Any, name: str, cells: list[dict[str, Any]], side: str, value: Any) -> None:
    """One side's median with its spread over the rounds."""
    there = [cell for cell in cells if side in cell["rates"]]
    sizes = [SIZES[name](cell) for cell in there]
    color = COLORS.get(side)
    drawn = axes.plot(
        sizes,
        [value(cell, cell["spread"][side]["median"]) for cell in there],
        "o-",
        markersize=3,
        color=color,
        label=NAMES.get(side, side),
    )
    ends = [[value(cell, cell["spread"][side][end]) for cell in there] for end in ("low", "high")]
    axes.fill_between(sizes, *ends, color=drawn[0].get_color(), alpha=0.2, linewidth=0)


def sides_of(cells: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(side for cell in cells for side in cell["rates"]))


def rate_picture(pyplot: Any, cells: list[dict[str, Any]], name: str, which: str) -> Any:
    """Rates against a size, and what the machine can do at most."""
    unit, limit = (
        ("GB/s", "read bandwidth") if which == "decode" else ("GFLOP/s", "multiply-add peak")
    )
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for side in sides_of(cells):
        line(axes, name, cells, side, lambda cell, rate: rate * 1e-9)
    sizes = [SIZES[name](cell) for cell in cells]
    axes.plot(sizes, [cell["peak"] * 1e-9 for cell in cells], "k--", linewidth=1, label=limit)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(LABELS[name])
    axes.set_ylabel(f"{which}, {unit}, one thread")
    axes.legend()
    return figure


def scaling_picture(pyplot: Any, cells: list[dict[str, Any]]) -> Any:
    """Milliseconds of a forward call against each size that grows."""
    names = ("seqlen", "window", "batch", "threads")
    figure, grid = pyplot.subplots(2, 2, figsize=(8, 6), layout="constrained")
    for name, axes in zip(names, grid.flat, strict=True):
        own = series_of(cells, name, "forward")
        for side in sides_of(own):
            line(axes, name, own, side, lambda cell, rate: work_of(cell) / rate * 1e3)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(LABELS.get(name, name))
        axes.set_ylabel("forward, ms")
    grid.flat[0].legend()
    return figure


def memory_picture(pyplot: Any, rows: list[dict[str, Any]]) -> Any:
    """Peak memory of forward and backward, the head dimension of the first row."""
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    dim = rows[0]["shape"][3]
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [r for r in rows if (r["way"], r["passes"], r["shape"][3]) == (way, "both", dim)]
        sizes = [row["shape"][1] for row in own]
        label, color = NAMES.get(way, way), COLORS.get(way, "0.55")
        amounts = [row["extra_bytes"] / 1e6 for row in own]
        axes.plot(sizes, amounts, "o-", markersize=3, color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(LABELS["seqlen"])
    axes.set_ylabel("MB above inputs and outputs")
    axes.legend()
    return figure


def speed_picture(pyplot: Any, means: list[dict[str, Any]], device: str) -> Any:
    """How many times as fast as torch's own attention: geometric means over the shapes."""
    figure, axes = pyplot.subplots(figsize=(7, 3.4), layout="constrained")
    kinds = list(dict.fromkeys((row["pass"], row["dtype"]) for row in means))
    for causal, color, offset in ((False, "0.55", -0.2), (True, "C0", 0.2)):
        own = {(r["pass"], r["dtype"]): r["geometric_mean"] for r in means if r["causal"] is causal}
        places = [n + offset for n, kind in enumerate(kinds) if kind in own]
        heights = [own[kind] for kind in kinds if kind in own]
        label = "causal" if causal else "full"
        bars = axes.bar(places, heights, 0.38, color=color, label=label)
        axes.bar_label(bars, fmt="{:.1f}", fontsize=8)
    axes.axhline(1, color="k", linewidth=0.8, linestyle="--")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(kinds)), ["\n".join(kind) for kind in kinds], fontsize=8)
    axes.set_ylabel("times torch's SDPA")
    axes.set_title(f"One thread of {device}, geometric means of six shapes", fontsize=9)
    axes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=machine.RESULTS)
    parser.add_argument("--to", type=Path, default=machine.RESULTS)
    parser.add_argument("--scaling", default="scaling.json", help="the file of run.py's suite")
    arguments = parser.parse_args()

    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "flashattn"}
    from matplotlib import pyplot

    figures: dict[str, Any] = {}
    bars = arguments.results / "cpu_vs_peers.json"
    if bars.exists():
        found = json.loads(bars.read_text())
        device = f"{found['machine']['cpu']} ({found['machine']['isa']})"
        figures["speed_against_torch"] = speed_picture(pyplot, found["means"], device)
    scaling = arguments.results / arguments.scaling
    if scaling.exists():
        cells = json.loads(scaling.read_text())["cells"]
        growing, cache = (
            series_of(cells, *key) for key in (("seqlen", "forward"), ("decode",) * 2)
        )
        if growing:
            figures["throughput"] = rate_picture(pyplot, growing, "seqlen", "forward")
            figures["scaling"] = scaling_picture(pyplot, cells)
        if cache:
            figures["decode"] = rate_picture(pyplot, cache, "decode", "decode")
    memory = arguments.results / "peak_memory.json"
    if memory.exists():
        figures["memory"] = memory_picture(pyplot, json.loads(memory.read_text())["rows"])
    for name, figure in figures.items():
        path = arguments.to / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        print("written to", path)


if __name__ == "__main__":
    main()
