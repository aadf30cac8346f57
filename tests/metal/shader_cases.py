"""The project's shaders run kernel by kernel in the simulator, on small problems, against float64.

Holds the Python side of shaders/abi.h and the geometry a case runs with. It bypasses the C++
schedule on purpose: a fault planted in a shader must be found even where the host would never send
such a problem.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from simulator import SHADERS, Library, Run, Simulator

BLOCK_ROWS, BLOCK_COLUMNS = 32, 16
DELTA_ROWS = 4
STORAGE = {"float32": "float", "float16": "half", "bfloat16": "Bfloat16"}
KERNELS = ("forward", "delta", "backward_dq", "backward_dv", "backward_dk")
KEY_SIDE = ("backward_dv", "backward_dk", "backward_dkv")
CONSTANT_ACCUMULATE, CONSTANT_HAS_DLSE = 0, 1


class Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "row", "head", "dim")]


class ScalarStrides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "head", "row")]


class Params(ctypes.Structure):
    """AttentionParams of shaders/abi.h."""

    _fields_ = [
        *[(name, Strides) for name in ("query", "key", "value", "out", "dout", "dq", "dk", "dv")],
        *[(name, ScalarStrides) for name in ("lse", "dlse")],
        *[(name, ctypes.c_uint32) for name in ("query_heads", "kv_heads", "heads_per_kv", "batch")],
        *[(name, ctypes.c_uint32) for name in ("seqlen_q", "seqlen_k", "head_dim", "value_dim")],
        ("first_threadgroup", ctypes.c_uint32),
        ("scale", ctypes.c_float),
        ("scale_log2e", ctypes.c_float),
        ("unused", ctypes.c_uint32),
    ]


SLOTS = [
    *("query", "key", "value", "out", "lse", "dout", "dlse", "delta", "dq", "dk", "dv"),
    *("row_intervals", "params"),
]


def check_abi() -> None:
    """The slots above are those of shaders/abi.h."""
    text = (SHADERS / "abi.h").read_text()
    pairs = re.findall(r"kBuffer(\w+) = (\d+)", text)
    found = {re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower(): int(number) for name, number in pairs}
    wanted = {name: number for number, name in enumerate(SLOTS)}
    assert found == wanted, f"shaders/abi.h changed: {found}"


@dataclass(frozen=True)
class Case:
    """One small problem. Tensors are (batch, row, head, dim), contiguous."""

    batch: int = 1
    seqlen_q: int = 37
    seqlen_k: int = 41
    query_heads: int = 2
    kv_heads: int = 1
    head_dim: int = 20
    value_dim: int = 12
    causal: bool = True
    dtype: str = "float32"
    # "value": the value of the last key, which one row sees, is NaN; "query": query and dout of row
    # 0 are.
    non_finite: str = ""
    seed: int = 0

    @property
    def tiles(self) -> tuple[int, int]:
        return (self.head_dim + 15) // 16 * 16, (self.value_dim + 15) // 16 * 16

    def instantiation(self, kernel: str) -> str:
        head, value = self.tiles
        sizes = (
            f"{DELTA_ROWS}"
            if kernel == "delta"
            else f"{head}, {value}, {BLOCK_ROWS}, {BLOCK_COLUMNS}"
        )
        function = "delta_rows" if kernel == "delta" else kernel
        return f'FLASHATTN_INSTANTIATE("{kernel}", {function}, {STORAGE[self.dtype]}, {sizes})'


@dataclass(frozen=True)
class Launch:
    """One instance of a kernel and the grid it takes."""

    kernel: str  # what it computes: a key of OUTPUTS
    shader: str  # stem of the file in shaders/
    instantiation: str  # host name: `kernel`
    block_rows: int  # rows of its own side that one threadgroup computes
    block_columns: int  # rows of the other side that it takes at a time
    threads: int
    half_fragments: bool = False  # matrix factors in half: only in register kernels
    constants: Mapping[int, bool] = field(default_factory=dict)

    @property
    def key_side(self) -> bool:
        return self.kernel in KEY_SIDE

    def with_constants(self, changed: Mapping[int, bool]) -> Launch:
        return replace(self, constants={**self.constants, **changed})


def staged(case: Case, kernel: str) -> Launch:
    """The kernels that pass scores through threadgroup memory, and delta."""
    rows = DELTA_ROWS if kernel == "delta" else BLOCK_ROWS
    return Launch(
        kernel=kernel,
        shader=kernel,
        instantiation=case.instantiation(kernel),
        block_rows=rows,
        block_columns=0 if kernel == "delta" else BLOCK_COLUMNS,
        threads=rows * (32 if kernel == "delta" else 4),
        constants={"forward": {}, "delta": {CONSTANT_HAS_DLSE: False}}.get(
            kernel, {CONSTANT_ACCUMULATE: False}
        ),
    )


@dataclass
class Tensors:
    """Arrays by slot name, and what float64 says the outputs are."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    expected: dict[str, np.ndarray] = field(default_factory=dict)


def widen(x: np.ndarray) -> np.ndarray:
    """To float64; bfloat16 is kept as its 16 bits."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def store(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "bfloat16":
        return np.ascontiguousarray(x, np.dtype(dtype))
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def visible(case: Case) -> np.ndarray:
    rows, keys = np.arange(case.seqlen_q)[:, None], np.arange(case.seqlen_k)[None, :]
    shift = case.seqlen_k - case.seqlen_q
    return keys <= rows + shift if case.causal else np.ones((case.seqlen_q, case.seqlen_k), bool)


def selected_product(weights: np.ndarray, x: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """weights @ x over the seen pairs alone: a NaN in a hidden row of x reaches nothing."""
    terms = np.where(seen[..., None], weights[..., None] * x[:, :, None], 0)
    return terms.sum(-2)


def expected(case: Case, a: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Definition in float64, with hidden positions selected away."""
    q, k, v, dout = (
        widen(a[name]).transpose(0, 2, 1, 3) for name in ("query", "key", "value", "dout")
    )
    group = case.query_heads // case.kv_heads
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    seen = visible(case)
    scale = case.head_dim**-0.5

    def sum_group(x: np.ndarray) -> np.ndarray:
        return x.reshape(case.batch, case.kv_heads, group, *x.shape[2:]).sum(2)

    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scores = np.where(seen, q @ k.swapaxes(-1, -2) * scale, -np.inf)
        top = np.max(scores, -1, keepdims=True, initial=-1e300)
        p = np.exp(scores - top)
        total = p.sum(-1, keepdims=True)
        lse = (top + np.log(total))[..., 0]
        p = np.where(seen & (total != 0), p / np.where(total != 0, total, 1), 0)
        out = selected_product(p, v, seen)
        delta = (out * dout).sum(-1)
        ds = np.where(seen, p * (dout @ v.swapaxes(-1, -2) - delta[..., None]), 0) * scale
        back = {
            "dq": selected_product(ds, k, seen),
            "dk": sum_group(selected_product(ds.swapaxes(-1, -2), q, seen.T)),
            "dv": sum_group(selected_product(p.swapaxes(-1, -2), dout, seen.T)),
        }
    result = {name: x.transpose(0, 2, 1, 3) for name, x in {"out": out, **back}.items()}
    return {**result, "lse": lse, "delta": delta}


def make_tensors(case: Case) -> Tensors:
    """Random inputs, outputs filled with NaN, and the expected results."""
    rng = np.random.default_rng(case.seed)

    def draw(rows: int, heads: int, dim: int) -> np.ndarray:
        return store(rng.standard_normal((case.batch, rows, heads, dim)), case.dtype)

    a = {
        "query": draw(case.seqlen_q, case.query_heads, case.head_dim),
        "key": draw(case.seqlen_k, case.kv_heads, case.head_dim),
        "value": draw(case.seqlen_k, case.kv_heads, case.value_dim),
        "dout": draw(case.seqlen_q, case.query_heads, case.value_dim),
    }
    nan = 0x7FC0 if case.dtype == "bfloat16" else np.nan
    if case.non_finite == "value":
        a["value"][:, -1] = nan
    if case.non_finite == "query":
        a["query"][:, 0] = nan
        a["dout"][:, 0] = nan
    tensors = Tensors(a, expected(case, a))
    for name, like in (("out", "dout"), ("dq", "query"), ("dk", "key"), ("dv", "value")):
        a[name] = np.full_like(a[like], 0xFFFF if case.dtype == "bfloat16" else np.nan)
    for name in ("lse", "delta"):
        a[name] = np.full((case.batch, case.query_heads, case.seqlen_q), np.nan, np.float32)
    a["dlse"] = np.zeros_like(a["lse"])
    shift = case.seqlen_k - case.seqlen_q
    end = shift + 1 if case.causal else 2**30
    interval = [-(2**30), end, case.seqlen_k, 0]
    a["row_intervals"] = np.tile(np.array(interval, np.int32), (case.batch, 1))
    a["params"] = np.frombuffer(bytearray(bytes(make_params(case))), np.uint8)
    return tensors


def make_params(case: Case) -> Params:
    p = Params()
    sizes = {
        "query": (case.seqlen_q, case.query_heads, case.head_dim),
        "key": (case.seqlen_k, case.kv_heads, case.head_dim),
        "value": (case.seqlen_k, case.kv_heads, case.value_dim),
        "out": (case.seqlen_q, case.query_heads, case.value_dim),
    }
    sizes |= {"dout": sizes["out"], "dq": sizes["query"], "dk": sizes["key"], "dv": sizes["value"]}
    for name, (rows, heads, dim) in sizes.items():
        setattr(p, name, Strides(rows * heads * dim, heads * dim, dim, 1))
    for name in ("lse", "dlse"):
        setattr(p, name, ScalarStrides(case.query_heads * case.seqlen_q, case.seqlen_q, 1))
    p.query_heads, p.kv_heads = case.query_heads, case.kv_heads
    p.heads_per_kv = case.query_heads // case.kv_heads
    p.batch, p.seqlen_q, p.seqlen_k = case.batch, case.seqlen_q, case.seqlen_k
    p.head_dim, p.value_dim = case.head_dim, case.value_dim
    p.scale = case.head_dim**-0.5
    p.scale_log2e = case.head_dim**-0.5 * np.log2(np.e)
    return p


def compile_kernel(sim: Simulator, case: Case, kernel: str, folder: Path = SHADERS) -> Library:
    return compile_launch(sim, staged(case, kernel), folder)


def compile_launch(sim: Simulator, launch: Launch, folder: Path = SHADERS) -> Library:
    return sim.compile_file(folder / f"{launch.shader}.metal", append=launch.instantiation)


def run_kernel(
    library: Library, case: Case, kernel: str, tensors: Tensors, accumulate: bool = False
) -> Run:
    """One staged kernel over its whole grid. accumulate: a gradient is added to what is there."""
    launch = staged(case, kernel)
    if kernel != "delta" and kernel != "forward":
        launch = launch.with_constants({CONSTANT_ACCUMULATE: accumulate})
    return run_launch(library, launch, case, tensors)


def run_launch(library: Library, launch: Launch, case: Case, tensors: Tensors) -> Run:
    """Dispatches one kernel over its whole grid; inputs it needs from earlier kernels are taken
    from `expected`.
    """
    a = dict(tensors.arrays)
    if launch.kernel.startswith("backward"):
        a["lse"] = np.ascontiguousarray(tensors.expected["lse"], np.float32)
        a["delta"] = np.ascontiguousarray(tensors.expected["delta"], np.float32)
    if launch.kernel == "delta":
        a["out"] = store(tensors.expected["out"], case.dtype)
    buffers: list[np.ndarray | bytes | None] = [a[name] for name in SLOTS]
    rows = case.seqlen_k if launch.key_side else case.seqlen_q
    heads = case.kv_heads if launch.key_side else case.query_heads
    groups = (rows + launch.block_rows - 1) // launch.block_rows * heads * case.batch
    compiled = library.kernel(launch.kernel, launch.constants)
    return compiled((groups, 1, 1), (launch.threads, 1, 1), buffers)


OUTPUTS = {
    "forward": ("out", "lse"),
    "delta": ("delta",),
    "backward_dq": ("dq",),
    "backward_dv": ("dv",),
    "backward_dk": ("dk",),
    "backward_dkv": ("dk", "dv"),
}


def worst_error(kernel: str, tensors: Tensors) -> float:
    """Largest |result - expected| over the kernel's outputs; equal infinities and NaNs count as no
    error.
    """
    worst = 0.0
    for name in OUTPUTS[kernel]:
        got, want = widen(tensors.arrays[name]), tensors.expected[name]
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        with np.errstate(invalid="ignore"):
            error = np.where(same, 0.0, np.abs(got - want))
        worst = max(worst, float(np.max(np.where(np.isnan(error), np.inf, error))))
    return worst
