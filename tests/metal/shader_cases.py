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
import reference
from shader_options import ShaderOptions, function_constants, make_options
from simulator import SHADERS, Library, Run, Simulator

DELTA_ROWS, SUM_HEADS = 4, 4
STORAGE = {"float32": "float", "float16": "half", "bfloat16": "Bfloat16"}
KERNELS = ("forward", "delta", "backward_dq", "backward_dv", "backward_dk")
# Those that only calls with the option have.
SUM_KERNELS = ("slope_gradient", "sink_gradient")
OPTION_KERNELS = ("mask_gradient", *SUM_KERNELS)
KEY_SIDE = ("backward_dv", "backward_dk", "backward_dkv")
CONSTANT_ACCUMULATE, CONSTANT_HAS_DLSE = 0, 1
CONSTANT_IS_RAGGED, CONSTANT_IS_PAGED = 12, 13


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
        ("first_block", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("max_slack", ctypes.c_float),
        *[(name, ctypes.c_uint32) for name in ("table_rows", "few_rows", "chunk_keys", "chunks")],
    ]


SLOTS = [
    *("query", "key", "value", "out", "lse", "dout", "dlse", "delta", "dq", "dk", "dv"),
    *("row_intervals", "params", "modifiers", "mask", "mask_tiles", "alibi_slopes", "row_shifts"),
    *("sinks", "dmask", "dalibi_slopes", "dsinks", "slope_rows", "status", "entries"),
    *("block_table", "partial_out", "partial_state"),
]


def check_abi() -> None:
    """The slots above are those of shaders/abi.h."""
    text = (SHADERS / "abi.h").read_text()
    pairs = re.findall(r"kBuffer(\w+) =\s+(\d+)", text)
    found = {re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower(): int(number) for name, number in pairs}
    wanted = {name: number for number, name in enumerate([*SLOTS, "count"])}
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
    # 0 are; "key": key and value of the last key; "infinity": values of the last two keys are -inf
    # and inf.
    non_finite: str = ""
    options: ShaderOptions = field(default_factory=ShaderOptions)
    seed: int = 0
    scale: float | None = None  # default head_dim ** -0.5
    window: tuple[int, int] | None = None  # keys left and right of a row's own, both inclusive
    key_length: int | None = None  # keys from there on are padding

    @property
    def factor(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def keys(self) -> int:
        return self.seqlen_k if self.key_length is None else self.key_length

    @property
    def interval(self) -> list[int]:
        """RowInterval of shaders/abi.h."""
        shift, far = self.keys - self.seqlen_q, 2**30
        left, right = self.window or (far, far)
        end = shift + 1 if self.causal else far
        return [max(shift - left, -far), min(end, shift + right + 1, far), self.keys, 0]

    @property
    def tiles(self) -> tuple[int, int]:
        return (self.head_dim + 15) // 16 * 16, (self.value_dim + 15) // 16 * 16

    @property
    def block(self) -> tuple[int, int]:
        """Rows of a threadgroup and of the other side per step, as cpp/src/metal/tuning.cpp."""
        return (16, 8) if max(self.tiles) > 128 else (32, 16)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Those that have something to do in this case."""
        more = ["mask_gradient"] if self.options.mask not in ("", "bool") else []
        more += ["slope_gradient"] if self.options.alibi else []
        more += ["sink_gradient"] if self.options.sinks else []
        return (*KERNELS, *more)

    def instantiation(self, kernel: str) -> str:
        if kernel in SUM_KERNELS:
            return f'FLASHATTN_INSTANTIATE("{kernel}", {kernel}, {SUM_HEADS})'
        tiles = ", ".join(str(n) for n in (*self.tiles, *self.block))
        sizes = str(DELTA_ROWS) if kernel == "delta" else tiles
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
    """The kernels that pass scores through threadgroup memory, delta, and the sums over rows."""
    rows, columns = case.block
    if kernel == "delta" or kernel in SUM_KERNELS:
        rows, columns = (DELTA_ROWS if kernel == "delta" else SUM_HEADS), 0
    return Launch(
        kernel=kernel,
        shader=kernel,
        instantiation=case.instantiation(kernel),
        block_rows=rows,
        block_columns=columns,
        threads=rows * (32 if columns == 0 else 4),
        constants=constants_of(case, kernel),
    )


def constants_of(case: Case, kernel: str) -> dict[int, bool]:
    """Those that the kernel declares."""
    own = {} if kernel == "mask_gradient" else {CONSTANT_IS_RAGGED: False}
    if kernel in SUM_KERNELS:
        return own
    if kernel == "delta":
        return own | {CONSTANT_HAS_DLSE: False}
    if kernel == "forward":
        own |= {CONSTANT_IS_PAGED: False}
    if kernel.startswith("backward"):
        own |= {CONSTANT_ACCUMULATE: False}
    return own | function_constants(case.options)


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


def expected(
    case: Case, a: dict[str, np.ndarray], options: dict[str, object]
) -> dict[str, np.ndarray]:
    """The oracle's results, by slot name."""
    q, k, v, dout = (widen(a[name]) for name in ("query", "key", "value", "dout"))
    options = {**options, "causal": case.causal, "scale": case.factor}
    options |= {"window": case.window or (-1, -1), "kv_lengths": [case.keys] * case.batch}
    forward = reference.attention(q, k, v, **options)
    back = reference.attention_backward(dout, q, k, v, **options)
    with np.errstate(invalid="ignore"):
        delta = (forward.out * dout).sum(-1).transpose(0, 2, 1)
    result = {"out": forward.out, "lse": forward.lse, "delta": delta}
    result |= {name: getattr(back, name) for name in ("dq", "dk", "dv")}
    for name in ("dmask", "dalibi_slopes", "dsinks"):
        if getattr(back, name) is not None:
            result[name] = getattr(back, name)
    if case.options.alibi:
        result["slope_rows"] = slope_rows(case, forward, dout, v)
    return result


def slope_rows(
    case: Case, forward: reference.Result, dout: np.ndarray, value: np.ndarray
) -> np.ndarray:
    """What each row adds to the slope gradients: (batch, query_heads, seqlen_q)."""
    v = np.repeat(value.transpose(0, 2, 1, 3), case.query_heads // case.kv_heads, 1)
    p = forward.probabilities
    dp = (dout.transpose(0, 2, 1, 3) @ v.swapaxes(-1, -2)) * forward.keep
    ds = np.where(forward.visible, p * (dp - (p * dp).sum(-1, keepdims=True)), 0.0)
    return -(ds * forward.distance).sum(-1)


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
    if case.non_finite in ("value", "key"):
        a["value"][:, -1] = nan
    if case.non_finite == "key":
        a["key"][:, -1] = nan
    if case.non_finite == "infinity":
        a["value"][:, -1] = store(np.array(np.inf), case.dtype)
        a["value"][:, -2] = store(np.array(-np.inf), case.dtype)
    if case.non_finite == "query":
        a["query"][:, 0] = nan
        a["dout"][:, 0] = nan
    options = make_options(case, store)
    tensors = Tensors(a, expected(case, a, options.reference))
    for name, like in (("out", "dout"), ("dq", "query"), ("dk", "key"), ("dv", "value")):
        a[name] = np.full_like(a[like], 0xFFFF if case.dtype == "bfloat16" else np.nan)
    for name in ("lse", "delta"):
        a[name] = np.full((case.batch, case.query_heads, case.seqlen_q), np.nan, np.float32)
    a["dlse"] = np.zeros_like(a["lse"])
    a["row_intervals"] = np.tile(np.array(case.interval, np.int32), (case.batch, 1))
    a["status"] = np.zeros(1, np.uint32)
    a["params"] = np.frombuffer(bytearray(bytes(make_params(case))), np.uint8)
    a["slope_rows"] = np.full_like(a["lse"], np.nan)
    options.modifiers.tile_count = score_tiles(case, options.arrays.get("mask"))
    a["modifiers"] = np.frombuffer(bytearray(bytes(options.modifiers)), np.uint8)
    a |= options.arrays
    return tensors


def score_tiles(case: Case, mask: np.ndarray | None) -> int:
    """How many tiles of scores one tile of the mask is added to."""
    if mask is None:
        return 0
    rows, keys = case.block
    counts = (case.batch, case.query_heads, -(-case.seqlen_q // rows), -(-case.seqlen_k // keys))
    return int(np.prod([n for n, size in zip(counts, mask.shape, strict=True) if size == 1]))


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
    p.blocks = 1  # enough for one threadgroup of a register kernel; run_register counts them
    p.table_rows = case.seqlen_q
    p.scale = case.factor
    p.scale_log2e = case.factor * np.log2(np.e)
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
    if kernel.startswith("backward"):
        launch = launch.with_constants({CONSTANT_ACCUMULATE: accumulate})
    return run_launch(library, launch, case, tensors)


# Inputs of a kernel that are outputs of earlier ones.
EARLIER = {
    "delta": ("out",),
    **dict.fromkeys(("backward_dq", *KEY_SIDE), ("lse", "delta")),
    **dict.fromkeys(("mask_gradient", "sink_gradient"), ("lse", "delta")),
    "slope_gradient": ("slope_rows",),
}


def threadgroups(launch: Launch, case: Case, tensors: Tensors) -> int:
    """The whole grid."""
    if launch.kernel in SUM_KERNELS:
        name = "dalibi_slopes" if launch.kernel == "slope_gradient" else "dsinks"
        return -(-tensors.arrays[name].size // launch.block_rows)
    if launch.kernel == "mask_gradient":
        batch, heads, rows, keys = tensors.arrays["mask"].shape
        return batch * heads * -(-rows // launch.block_rows) * -(-keys // launch.block_columns)
    rows = case.seqlen_k if launch.key_side else case.seqlen_q
    heads = case.kv_heads if launch.key_side else case.query_heads
    return -(-rows // launch.block_rows) * heads * case.batch


def run_launch(library: Library, launch: Launch, case: Case, tensors: Tensors) -> Run:
    """Dispatches one kernel over its whole grid; inputs it needs from earlier kernels are taken
    from `expected`.
    """
    a = dict(tensors.arrays)
    for name in EARLIER.get(launch.kernel, ()):
        a[name] = store(tensors.expected[name], case.dtype if name == "out" else "float32")
    buffers: list[np.ndarray | bytes | None] = [a.get(name) for name in SLOTS]
    groups = threadgroups(launch, case, tensors)
    compiled = library.kernel(launch.kernel, launch.constants)
    return compiled((groups, 1, 1), (launch.threads, 1, 1), buffers)


OUTPUTS = {
    "forward": ("out", "lse"),
    "delta": ("delta",),
    "backward_dq": ("dq",),
    "backward_dv": ("dv",),
    "backward_dk": ("dk",),
    "backward_dkv": ("dk", "dv"),
    "mask_gradient": ("dmask",),
    "slope_gradient": ("dalibi_slopes",),
    "sink_gradient": ("dsinks",),
}


def outputs(case: Case, kernel: str) -> tuple[str, ...]:
    slopes = kernel == "backward_dq" and case.options.alibi != ""
    return (*OUTPUTS[kernel], "slope_rows") if slopes else OUTPUTS[kernel]


def worst_error(case: Case, kernel: str, tensors: Tensors) -> float:
    """Largest |result - expected| over the kernel's outputs; equal infinities and NaNs count as no
    error.
    """
    worst = 0.0
    for name in outputs(case, kernel):
        got, want = widen(tensors.arrays[name]), tensors.expected[name]
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        with np.errstate(invalid="ignore"):
            error = np.where(same, 0.0, np.abs(got - want))
        worst = max(worst, float(np.max(np.where(np.isnan(error), np.inf, error))))
    return worst
