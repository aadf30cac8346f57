"""Whether a measured cell, or the mean over cells, reaches what the CPU design asks of it."""

from __future__ import annotations

from typing import Any

from cells import (
    DECODE_BAR,
    PEAK_SEQLEN,
    RUNTIME_BARS,
    RUNTIMES,
    TORCH_BARS,
    geometric_mean,
    torch_bar,
)


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
        bars |= {name: (least, ratios[name]) for name in RUNTIMES if name in ratios}
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
                and "bars" in cell
            ]
            if ratios:
                mean = geometric_mean(ratios)
                row = {"pass": name, "dtype": dtype, "causal": causal, "geometric_mean": mean}
                rows.append({**row, "bar": bar, "met": mean >= bar})
    return rows
