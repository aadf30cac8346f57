"""The picture of `bench`: bars of GFLOP/s, one group for each problem. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_OURS = "#1f6feb"
_OTHERS = ("#9a9a9a", "#c8823c", "#4c9f70", "#a06cb0")


def plot_bench(result: dict[str, Any], path: Path) -> Path:
    """Writes the bars of bench's result, as SVG unless the name of the file says otherwise."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = path if path.suffix else path.with_suffix(".svg")
    cells, sides = result["cells"], result["sides"]
    width = 0.8 / len(sides)
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.1 * len(cells) + 2), 4.2))
    others = iter(_OTHERS)
    for number, side in enumerate(sides):
        heights = [cell["gflops"][side] or 0.0 for cell in cells]
        places = [index + (number - (len(sides) - 1) / 2) * width for index in range(len(cells))]
        color = _OURS if side == "flashattn" else next(others)
        label = f"{side} {result['versions'][side]}"
        axes.bar(places, heights, width * 0.9, label=label, color=color)
    axes.set_xticks(range(len(cells)), [_name(cell) for cell in cells], fontsize=8)
    axes.set_ylabel("GFLOP/s (more is better)")
    axes.set_title(f"Attention on the CPU, {result['threads']} threads", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _name(cell: dict[str, Any]) -> str:
    batch, seqlen, heads, head_dim = cell["shape"]
    sizes = f"{batch}x{seqlen}x{heads}x{head_dim}"
    kind = "backward" if cell["backward"] else "forward"
    return f"{kind}\n{sizes}\n{cell['dtype']}{' causal' if cell['causal'] else ''}"
