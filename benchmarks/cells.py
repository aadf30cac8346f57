"""What is measured, and what is asked of it: the grid and the bars of the CPU design.

A cell is a dict: pass ("forward", "backward", "decode"), dtype, shape, causal. Shapes of forward
and backward are (batch, heads, seqlen, head_dim), of decode (query_heads, kv_heads, seqlen_k,
head_dim).
"""

from __future__ import annotations

import math
from typing import Any

Cell = dict[str, Any]

DTYPES = ("float32", "bfloat16", "float16")
GRID = (
    (1, 8, 512, 64),
    (1, 8, 2048, 64),
    (1, 8, 2048, 128),
    (1, 4, 4096, 64),
    (2, 32, 512, 128),
    (8, 12, 128, 64),
)
DECODE_GRID = ((8, 8, 16384, 128), (32, 8, 16384, 128))

# (pass, dtype): {causal: (least ratio to torch in every cell, geometric mean, fraction of peak)}
TORCH_BARS: dict[tuple[str, str], dict[bool, tuple[float, float, float]]] = {
    ("forward", "float32"): {False: (1.2, 1.3, 0.85), True: (1.35, 1.8, 0.80)},
    ("forward", "bfloat16"): {False: (2.2, 2.5, 0.80), True: (2.5, 3.4, 0.75)},
    ("forward", "float16"): {False: (2.0, 2.6, 0.85), True: (2.4, 3.5, 0.80)},
    ("backward", "float32"): {False: (1.2, 1.3, 0.85), True: (1.35, 1.8, 0.80)},
    ("backward", "bfloat16"): {False: (1.6, 2.0, 0.77), True: (2.0, 2.8, 0.75)},
    ("backward", "float16"): {False: (10.0, 15.0, 0.85), True: (15.0, 20.0, 0.80)},
}
# Backward of float32, full, at seqlen 128.
SHORT_BACKWARD_BAR = 1.05
# The fraction of peak is asked from here on.
PEAK_SEQLEN = 2048
# Forward against an inference runtime: full, causal.
RUNTIME_BARS = {False: 1.0, True: 1.8}
DECODE_BAR = 0.85  # of the read bandwidth


def all_cells(passes: list[str], dtypes: list[str]) -> list[Cell]:
    cells: list[Cell] = []
    for name in passes:
        for dtype in dtypes:
            if name == "decode":
                shapes = DECODE_GRID if dtype != "float16" else ()
                cells += [
                    {"pass": name, "dtype": dtype, "shape": s, "causal": False} for s in shapes
                ]
                continue
            cells += [
                {"pass": name, "dtype": dtype, "shape": shape, "causal": causal}
                for causal in (False, True)
                for shape in GRID
            ]
    return cells


def work_of(cell: Cell) -> float:
    """Floating-point operations; for decode the bytes of keys and values."""
    if cell["pass"] == "decode":
        _, kv_heads, seqlen, head_dim = cell["shape"]
        return 2.0 * kv_heads * seqlen * head_dim * (4 if cell["dtype"] == "float32" else 2)
    batch, heads, seqlen, head_dim = cell["shape"]
    products = 4 if cell["pass"] == "forward" else 10
    return products * batch * heads * seqlen**2 * head_dim * (0.5 if cell["causal"] else 1.0)


def torch_bar(cell: Cell) -> float:
    """The least ratio to torch in this cell."""
    bar = TORCH_BARS[cell["pass"], cell["dtype"]][cell["causal"]][0]
    short = cell["pass"] == "backward" and cell["dtype"] == "float32" and cell["shape"][2] == 128
    return SHORT_BACKWARD_BAR if short and not cell["causal"] else bar


def geometric_mean(numbers: list[float]) -> float:
    return math.exp(sum(math.log(x) for x in numbers) / len(numbers))
