"""What is measured, and what is asked of it: suites of cells, and the bars of the CPU design.

A cell is a dict: pass ("forward", "backward", "decode"), dtype, shape, causal, and where they are
not the default kv_heads, window (keys that a row sees, its own the last) and threads. Shapes of
forward and backward are (batch, heads, seqlen, head_dim), of decode (query_heads, kv_heads,
seqlen_k, head_dim). A cell of the suite "scaling" has the name of its series.
"""

from __future__ import annotations

import math
import os
from typing import Any

Cell = dict[str, Any]

DTYPES = ("float32", "bfloat16", "float16")
PASSES = ("forward", "backward", "decode")
GRID = (
    (1, 8, 512, 64),
    (1, 8, 2048, 64),
    (1, 8, 2048, 128),
    (1, 4, 4096, 64),
    (2, 32, 512, 128),
    (8, 12, 128, 64),
)
DECODE_GRID = ((8, 8, 16384, 128), (32, 8, 16384, 128))
# Many short sequences, and few long ones.
SMALL = ((256, 8, 16, 64), (128, 8, 32, 64), (64, 12, 64, 64))
LONG = ((1, 2, 8192, 64), (1, 1, 16384, 128))
GROUPED = (((1, 32, 2048, 128), 8), ((4, 16, 512, 64), 1))  # shape, kv_heads
WINDOWED = (((1, 8, 4096, 64), 256), ((1, 8, 8192, 64), 1024))  # shape, window

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
RUNTIMES = ("openvino", "onnxruntime")
DECODE_BAR = 0.85  # of the read bandwidth


def all_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def grid(passes: list[str], dtypes: list[str]) -> list[Cell]:
    """The cells that have bars."""
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


def features(passes: list[str], dtypes: list[str]) -> list[Cell]:
    """Short and long sequences, grouped heads, windows."""
    plain = [{"shape": shape, "causal": True} for shape in (*SMALL, *LONG)]
    grouped = [{"shape": shape, "causal": True, "kv_heads": n} for shape, n in GROUPED]
    windows = [{"shape": shape, "causal": True, "window": n} for shape, n in WINDOWED]
    return [
        {"pass": name, "dtype": dtype, **cell}
        for name in passes
        if name != "decode"
        for dtype in dtypes
        for cell in (*plain, *grouped, *windows)
    ]


def scaling(passes: list[str], dtypes: list[str]) -> list[Cell]:
    """Cost as one size grows, the others fixed."""
    series: list[Cell] = [
        {"series": "seqlen", "shape": (1, 4, 2**n, 64), "causal": True} for n in range(7, 14)
    ]
    series += [
        {"series": "window", "shape": (1, 4, 4096, 64), "causal": True, "window": 2**n}
        for n in range(5, 13)
    ]
    series += [{"series": "batch", "shape": (2**n, 4, 128, 64), "causal": True} for n in range(8)]
    series += [
        {"series": "threads", "shape": (1, 8, 2048, 64), "causal": True, "threads": n + 1}
        for n in range(all_cores())
    ]
    cells = [
        {"pass": name, "dtype": dtype, **cell}
        for name in passes
        if name != "decode"
        for dtype in dtypes
        for cell in series
    ]
    if "decode" in passes:
        cells += [
            {"pass": "decode", "dtype": dtype, "series": "decode", "causal": False}
            | {"shape": (8, 8, 2**n, 128)}
            for dtype in dtypes
            if dtype != "float16"
            for n in range(9, 16)
        ]
    return cells


SUITES = {"cpu_vs_peers": grid, "features": features, "scaling": scaling}
# The sides that a suite compares with unless told otherwise.
SUITE_PEERS = {
    "cpu_vs_peers": ("torch", "torch_contiguous", "onnxruntime", "openvino", "jax", "mlx"),
    "features": ("torch", "torch_contiguous", "flex", "onnx_attention", "jax", "mlx"),
    "scaling": ("torch",),
}


def threads_of(cell: Cell) -> int:
    """Threads that every side of the cell has."""
    return int(cell.get("threads", 1))


def kv_heads_of(cell: Cell) -> int:
    """Key heads of the cell; a decode cell's stand in its shape."""
    return int(
        cell["shape"][1] if cell["pass"] == "decode" else cell.get("kv_heads") or cell["shape"][1]
    )


def work_of(cell: Cell) -> float:
    """Floating-point operations; for decode the bytes of keys and values."""
    if cell["pass"] == "decode":
        _, kv_heads, seqlen, head_dim = cell["shape"]
        return 2.0 * kv_heads * seqlen * head_dim * (4 if cell["dtype"] == "float32" else 2)
    batch, heads, seqlen, head_dim = cell["shape"]
    products = 4 if cell["pass"] == "forward" else 10
    pairs = seqlen**2 * (0.5 if cell["causal"] else 1.0)
    window = cell.get("window")
    if window is not None and window < seqlen:
        pairs = seqlen * window - window**2 / 2
    return products * batch * heads * pairs * head_dim


def torch_bar(cell: Cell) -> float:
    """The least ratio to torch in this cell."""
    bar = TORCH_BARS[cell["pass"], cell["dtype"]][cell["causal"]][0]
    short = cell["pass"] == "backward" and cell["dtype"] == "float32" and cell["shape"][2] == 128
    return SHORT_BACKWARD_BAR if short and not cell["causal"] else bar


def geometric_mean(numbers: list[float]) -> float:
    return math.exp(sum(math.log(x) for x in numbers) / len(numbers))
