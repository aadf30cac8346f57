"""The whole option space at random: sizes, dtypes, layouts, strides and every option at once,
forward and all gradients against the oracle.

2000 problems on the CPU, divided among its instruction sets, and 300 on a simulated Metal device
(FLASHATTN_HYPOTHESIS=nightly: far more). The problems are small: what is looked for is a pair of
options, or an option and a stride, that do not compose.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from cases import Case, Problem, check_gradients, check_result
from flashattn import DropoutShard
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from targets import Target, all_targets
from yardstick import GRADIENTS

CPU_PROBLEMS, METAL_PROBLEMS, NIGHTLY_PROBLEMS = 2000, 300, 20000
MASK_DTYPES = ("bool", "float16", "bfloat16", "float32", "float64")
ARRANGEMENTS = ("contiguous", "reversed", "padded", "spread", "heads_first", "dims_outside")


def problems_per_target() -> int:
    targets = all_targets()
    if os.environ.get("FLASHATTN_HYPOTHESIS") == "nightly":
        return NIGHTLY_PROBLEMS // len(targets)
    on_metal = any(target.backend == "metal" for target in targets)
    return -(-(METAL_PROBLEMS if on_metal else CPU_PROBLEMS) // len(targets))


@dataclass(frozen=True)
class Options:
    """What a Case cannot say: the mask's shape and dtype, dropout's numbering, the arrangements."""

    mask_axes: tuple[bool, bool, bool, bool] | None  # which of (batch, heads, rows, keys) it has
    mask_dtype: str
    mask_leading: bool  # leading axes of size 1 are left out
    dropout_offset: int
    shard: tuple[int, int, int] | None  # start of heads, queries and keys in a larger problem
    arrangements: tuple[str, ...]  # of query, key, value, dout, mask
    layout: str


@st.composite
def cases(draw: st.DrawFn) -> Case:
    # One tile size of the Metal kernels, so that few of them are compiled.
    dims = st.integers(1, 16) if os.environ.get("METAL_SIM_CACHE") else st.integers(1, 70)
    lengths = st.one_of(st.integers(1, 20), st.integers(1, 60))
    batch, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    seqlen_q, seqlen_k = draw(lengths), draw(lengths)
    bound = st.one_of(st.just(-1), st.integers(0, 40))
    maybe = st.booleans()
    return Case(
        batch,
        kv_heads * draw(st.integers(1, 3)),
        kv_heads,
        seqlen_q,
        seqlen_k,
        draw(dims),
        draw(st.one_of(st.none(), dims)),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        causal=draw(st.sampled_from([False, False, True, "top_left"])),
        window=draw(st.one_of(st.none(), st.tuples(bound, bound))),
        scale=draw(st.one_of(st.none(), st.floats(-1.0, 1.0, width=32))),
        softcap=draw(st.one_of(st.none(), st.floats(0.5, 20.0, width=32))),
        q_offset=draw(st.one_of(st.none(), st.integers(-40, 100))),
        k_offset=draw(st.one_of(st.none(), st.integers(-40, 100))),
        kv_lengths=tuple(draw(st.integers(0, seqlen_k)) for _ in range(batch))
        if draw(maybe)
        else None,
        alibi=draw(st.sampled_from([None, "head", "batch"])),
        sinks=draw(maybe),
        dropout_p=draw(st.sampled_from([None, 0.1, 0.5, 0.9])),
        seed=draw(st.integers(0, 5)),
    )


@st.composite
def options(draw: st.DrawFn) -> Options:
    axes = draw(st.one_of(st.none(), st.tuples(*[st.booleans()] * 4)))
    start = st.integers(0, 9)
    return Options(
        mask_axes=axes,
        mask_dtype=draw(st.sampled_from(MASK_DTYPES)),
        mask_leading=draw(st.booleans()),
        dropout_offset=draw(st.sampled_from([0, 1, 2**32 - 3, 2**64 - 2])),
        shard=draw(st.one_of(st.none(), st.tuples(start, start, start))),
        arrangements=tuple(draw(st.sampled_from(ARRANGEMENTS)) for _ in range(5)),
        layout=draw(st.sampled_from(["bshd", "bhsd"])),
    )


def arranged(array: NDArray[Any], how: str) -> NDArray[Any]:
    """The same values behind other strides; the memory between them holds NaN, or True."""
    hole = True if array.dtype == np.bool_ else np.array(np.nan, array.dtype)
    axis = min(1, array.ndim - 1)
    if how == "reversed":
        return np.flip(np.ascontiguousarray(np.flip(array, axis)), axis)
    if how == "padded":
        wide = np.full((*array.shape[:-1], array.shape[-1] + 3), hole, array.dtype)
        wide[..., 1:-2] = array
        return wide[..., 1:-2]
    if how == "spread":
        wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), hole, array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    if how == "heads_first" and array.ndim == 4:
        return np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)
    if how == "dims_outside":
        return np.asfortranarray(array)
    return array


def draw_mask(problem: Problem, chosen: Options) -> NDArray[Any] | None:
    if chosen.mask_axes is None:
        return None
    case = problem.case
    full = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)
    shape = [size if has else 1 for size, has in zip(full, chosen.mask_axes, strict=True)]
    while chosen.mask_leading and len(shape) > 1 and shape[0] == 1:
        del shape[0]
    open_to = problem.rng.random(shape) < 0.7
    if chosen.mask_dtype == "bool":
        return open_to
    dtype = ml_dtypes.bfloat16 if chosen.mask_dtype == "bfloat16" else chosen.mask_dtype
    values = problem.rng.standard_normal(shape)
    return np.where(open_to, values, -np.inf).astype(dtype)


def add_options(problem: Problem, chosen: Options) -> None:
    mask = draw_mask(problem, chosen)
    if mask is not None:
        problem.options["mask"] = mask
    if "dropout_p" not in problem.options:
        return
    problem.options["dropout_offset"] = chosen.dropout_offset
    if chosen.shard is not None:
        heads, queries, keys = chosen.shard
        case = problem.case
        problem.options["dropout_shard"] = DropoutShard(
            global_heads=case.heads + heads,
            head_start=heads,
            global_queries=case.seqlen_q + queries + 1,
            query_start=queries,
            global_keys=case.seqlen_k + keys + 3,
            key_start=keys,
        )


def in_layout(array: Any, layout: str) -> Any:
    return array.swapaxes(1, 2) if layout == "bhsd" else array


@settings(max_examples=problems_per_target())
@given(case=cases(), chosen=options())
def test_options_compose(target: Target, case: Case, chosen: Options) -> None:
    problem = Problem(case)
    add_options(problem, chosen)
    # Where plain arithmetic is exact (every row sees one key at most) the rule has no scale.
    assume(all(error > 0 for error in problem.yardstick.values()))
    assume(all(error > 0 for error in problem.gradient_yardstick.values()))
    query, key, value, dout = (
        arranged(array, how)
        for array, how in zip((*problem.inputs, problem.dout), chosen.arrangements[:4], strict=True)
    )
    opts = dict(problem.options)
    if "mask" in opts:
        opts["mask"] = arranged(opts["mask"], chosen.arrangements[4])
    opts["layout"] = layout = chosen.layout
    q, k, v, do = (in_layout(array, layout) for array in (query, key, value, dout))
    out, lse = target.forward(q, k, v, **opts)
    check_result(problem, in_layout(out, layout), lse)
    grads = target.backward(do, q, k, v, out, lse, dlse=problem.dlse, **opts)
    found = {name: getattr(grads, name) for name in GRADIENTS}
    found |= {name: in_layout(found[name], layout) for name in ("dq", "dk", "dv")}
    check_gradients(problem, SimpleNamespace(**found))
