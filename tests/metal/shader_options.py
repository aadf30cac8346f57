"""Options of a shader case: the arrays, parameters and function constants that the host would hand
to a kernel, and the same options as tests/reference.py takes them.

Holds the Python side of ModifierParams in shaders/abi.h.
"""

from __future__ import annotations

import ctypes
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import reference
from simulator import SHADERS

MASK_TILE = 32  # rows and keys of one tile of the class table
NONE, MIXED, ALL = 0, 1, 2
AXES = "bhqk"


@dataclass(frozen=True)
class ShaderOptions:
    """mask: the dtype, or "" for none; mask_axes: those along which it is not broadcast."""

    mask: str = ""
    mask_axes: str = AXES
    softcap: float = 0.0
    alibi: str = ""  # head, batch
    sinks: bool = False
    dropout_p: float = 0.0

    @property
    def any(self) -> bool:
        return self != ShaderOptions(mask_axes=self.mask_axes)


SEED, OFFSET = 0x1234_5678_9ABC_DEF0, 2**40 + 3
# Starts at odd places, so that no row's numbers begin at a multiple of four.
SHARD = reference.DropoutShard(
    global_heads=5,
    head_start=1,
    global_queries=101,
    query_start=7,
    global_keys=2**31 + 3,
    key_start=9,
)


class ScoreStrides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "head", "row", "key")]


class Modifiers(ctypes.Structure):
    """ModifierParams of shaders/abi.h."""

    _fields_ = [
        *[(name, ScoreStrides) for name in ("mask", "mask_tiles", "dmask")],
        *[(name, ctypes.c_int64) for name in ("slopes_batch", "slopes_head")],
        *[(name, ctypes.c_int64) for name in ("dslopes_batch", "dslopes_head")],
        *[(name, ctypes.c_int64) for name in ("sinks_head", "dsinks_head")],
        *[(name, ctypes.c_uint64) for name in ("dropout_offset", "global_heads", "head_start")],
        *[(name, ctypes.c_uint64) for name in ("global_queries", "query_start")],
        *[(name, ctypes.c_uint64) for name in ("global_keys", "key_start")],
        *[(name, ctypes.c_uint32) for name in ("seed_low", "seed_high", "dropout_threshold")],
        *[(name, ctypes.c_float) for name in ("dropout_scale", "softcap", "inverse_softcap")],
        *[(name, ctypes.c_uint32) for name in ("mask_tile_rows", "mask_tile_keys")],
        *[(name, ctypes.c_uint32) for name in ("mask_batch", "mask_heads", "mask_rows")],
        *[(name, ctypes.c_uint32) for name in ("mask_keys", "slopes_per_batch", "tile_count")],
        ("first_tile", ctypes.c_uint64),
    ]


def constant_ids() -> dict[str, int]:
    """FunctionConstantId of shaders/abi.h, in snake case."""
    pairs = re.findall(r"kConstant(\w+) = (\d+)", (SHADERS / "abi.h").read_text())
    return {re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower(): int(n) for name, n in pairs}


def function_constants(options: ShaderOptions) -> dict[int, bool]:
    ids = constant_ids()
    on = {
        "has_modifiers": options.any,
        "has_softcap": options.softcap != 0.0,
        "has_alibi": options.alibi != "",
        "has_mask": options.mask != "",
        "mask_is_bool": options.mask == "bool",
        "mask_is_half": options.mask == "float16",
        "mask_is_bfloat": options.mask == "bfloat16",
        "has_sinks": options.sinks,
        "has_dropout": options.dropout_p != 0.0,
        "slope_gradient": options.alibi != "",
    }
    return {ids[name]: value for name, value in on.items()}


def full_shape(case: Any) -> tuple[int, int, int, int]:
    return case.batch, case.query_heads, case.seqlen_q, case.seqlen_k


def _strides(shape: tuple[int, ...]) -> ScoreStrides:
    """Of a contiguous array, 0 along axes of size 1."""
    steps = [int(np.prod(shape[axis + 1 :])) for axis in range(4)]
    return ScoreStrides(*(0 if n == 1 else step for n, step in zip(shape, steps, strict=True)))


def draw_mask(case: Any, rng: np.random.Generator) -> np.ndarray:
    """float64 or bool: random, with a tile that hides everything, one that hides nothing and one
    row without a key.
    """
    axes = case.options.mask_axes
    full = full_shape(case)
    shape = tuple(n if axis in axes else 1 for axis, n in zip(AXES, full, strict=True))
    shown = rng.random(shape) < 0.7
    if shape[2] > 1 and shape[3] > 1:
        shown[:, :, :MASK_TILE, :MASK_TILE] = False
        shown[:, :, MASK_TILE:, MASK_TILE:] = True
        shown[:, :, -1] = False
    if case.options.mask == "bool":
        return shown
    # Exact in every storage type.
    return np.where(shown, rng.integers(-8, 9, shape) / 4, -np.inf)


def tile_classes(mask: np.ndarray) -> np.ndarray:
    """What each MASK_TILE x MASK_TILE tile of the mask lets through."""
    shown = mask if mask.dtype == bool else ~np.isneginf(mask)
    rows, keys = ((n + MASK_TILE - 1) // MASK_TILE for n in shown.shape[2:])
    classes = np.full((*shown.shape[:2], rows, keys), MIXED, np.uint8)
    for r in range(rows):
        for k in range(keys):
            tile = shown[
                :, :, r * MASK_TILE : (r + 1) * MASK_TILE, k * MASK_TILE : (k + 1) * MASK_TILE
            ]
            classes[:, :, r, k][~tile.any((2, 3))] = NONE
            classes[:, :, r, k][tile.all((2, 3))] = ALL
    return classes


@dataclass
class OptionArrays:
    """`arrays` by slot name; `reference` for tests/reference.py."""

    arrays: dict[str, np.ndarray]
    reference: dict[str, Any]
    modifiers: Modifiers


def make_options(case: Any, store: Any) -> OptionArrays:
    """`store(array, dtype)` rounds to a storage type."""
    options: ShaderOptions = case.options
    rng = np.random.default_rng(case.seed + 1000)
    made = OptionArrays({}, {}, Modifiers())
    p = made.modifiers
    if options.mask:
        mask = draw_mask(case, rng)
        made.reference["mask"] = mask
        made.arrays["mask"] = mask if mask.dtype == bool else store(mask, options.mask)
        made.arrays["mask_tiles"] = tile_classes(mask)
        made.arrays["dmask"] = np.full(mask.shape, np.nan, np.float32)
        p.mask, p.dmask = _strides(mask.shape), _strides(mask.shape)
        p.mask_tiles = _strides(made.arrays["mask_tiles"].shape)
        p.mask_tile_rows = p.mask_tile_keys = MASK_TILE
        p.mask_batch, p.mask_heads, p.mask_rows, p.mask_keys = mask.shape
    if options.softcap:
        made.reference["softcap"] = p.softcap = options.softcap
        p.inverse_softcap = 1.0 / options.softcap
    if options.alibi:
        shape = (case.query_heads,) if options.alibi == "head" else full_shape(case)[:2]
        slopes = rng.uniform(0.01, 0.5, shape).astype(np.float32)
        made.arrays["alibi_slopes"] = made.reference["alibi_slopes"] = slopes
        made.arrays["row_shifts"] = np.full(case.batch, case.seqlen_k - case.seqlen_q, np.int64)
        made.arrays["dalibi_slopes"] = np.full(shape, np.nan, np.float32)
        p.slopes_head = p.dslopes_head = 1
        p.slopes_per_batch = int(options.alibi == "batch")
        p.slopes_batch = p.dslopes_batch = case.query_heads * p.slopes_per_batch
    if options.sinks:
        sinks = rng.standard_normal(case.query_heads).astype(np.float32)
        made.arrays["sinks"] = made.reference["sinks"] = sinks
        made.arrays["dsinks"] = np.full(case.query_heads, np.nan, np.float32)
        p.sinks_head = p.dsinks_head = 1
    if options.dropout_p:
        set_dropout(p, options.dropout_p)
        made.reference |= {"dropout_p": options.dropout_p, "dropout_seed": SEED}
        made.reference |= {"dropout_offset": OFFSET, "dropout_shard": SHARD}
    return made


def set_dropout(p: Modifiers, probability: float) -> None:
    p.dropout_offset = OFFSET
    for name in ("head", "query", "key"):
        setattr(p, f"{name}_start", getattr(SHARD, f"{name}_start"))
    p.global_heads = SHARD.global_heads
    p.global_queries, p.global_keys = SHARD.global_queries, SHARD.global_keys
    p.seed_low, p.seed_high = SEED & 0xFFFFFFFF, SEED >> 32
    p.dropout_threshold = math.ceil(probability * 2**24)
    p.dropout_scale = 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)
