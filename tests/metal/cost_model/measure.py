"""Counts of one tile of a kernel: what a threadgroup does per block of the other side, as the
difference of two runs with different numbers of blocks, so that prologue and epilogue drop out.
Nothing is masked: causal problems spend nearly all their time in such tiles.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path += [
    str(Path(__file__).resolve().parent.parent),
    str(Path(__file__).resolve().parent.parent / "cost_model"),
]

from instructions import Counted, build, program
from model import Shape
from shader_cases import Case, Launch, Tensors, compile_launch, make_tensors, run_launch, store
from simulator import SHADERS, Library, Run, Simulator

FEWER, MORE = 4, 8  # blocks of the two runs


def useful_slots(kernel: str, head_dim: int) -> float:
    """Slots per score element that metal-flash-attention counts: head_dim for each matrix product
    of the pass (dK and dV together need four), and 5 for the softmax.
    """
    products = {"forward": 2, "backward_dq": 3}.get(kernel, 4)
    parts = 2 if kernel in ("backward_dv", "backward_dk") else 1
    return (products * head_dim + 5) / parts


@dataclass(frozen=True)
class Measured:
    """One kernel: its launch, its tile and what the runs counted."""

    name: str
    shape: Shape
    counts: dict[str, float]
    moving: dict[str, float] | None  # the same when every block raises every row's maximum
    threadgroup_bytes: int


def one_threadgroup(launch: Launch, head_dim: int, dtype: str, blocks: int) -> Case:
    """A problem that one threadgroup computes, with `blocks` blocks of the other side."""
    other = blocks * launch.block_columns
    rows, keys = (other, launch.block_rows) if launch.key_side else (launch.block_rows, other)
    return Case(
        seqlen_q=rows, seqlen_k=keys, query_heads=1, head_dim=head_dim, value_dim=head_dim,
        causal=False, dtype=dtype,
    )  # fmt: skip


def ordered_scores(tensors: Tensors, case: Case, block: int, rising: bool) -> None:
    """Keys whose scores fall, or rise by far more than any slack, from block to block."""
    steps = np.arange(case.seqlen_k) // block * (2.0 if rising else -2.0) / case.head_dim**0.5
    key = np.broadcast_to(steps[None, :, None, None], tensors.arrays["key"].shape)
    tensors.arrays["key"][...] = store(key, case.dtype)
    tensors.arrays["query"][...] = store(np.ones(tensors.arrays["query"].shape), case.dtype)


def difference(run: Callable[[int], dict[str, float]]) -> dict[str, float]:
    fewer, more = run(FEWER), run(MORE)
    return {name: (more[name] - fewer.get(name, 0)) / (MORE - FEWER) for name in more}


def translated(launch: Launch) -> str:
    return program(SHADERS / f"{launch.shader}.metal", launch.instantiation, launch.constants)


def counts_of(
    simulator: Simulator, launch: Launch, head_dim: int, dtype: str, rising: bool
) -> dict[str, float]:
    counted = build(translated(launch))
    library = simulator.load(counted.path)
    checked = compile_launch(simulator, launch)

    def run(blocks: int) -> dict[str, float]:
        case = one_threadgroup(launch, head_dim, dtype, blocks)
        tensors = make_tensors(case)
        ordered_scores(tensors, case, launch.block_columns, rising)
        return both_counts(
            counted, library, checked, lambda x: run_launch(x, launch, case, tensors)
        )

    return difference(run)


def both_counts(
    counted: Counted, library: Library, checked: Library, run: Callable[[Library], Run]
) -> dict[str, float]:
    """What the simulator counts in a run of `checked`, and `counted` in one of its `library`."""
    with_checker = run(checked)
    assert with_checker.reports == [], with_checker.reports
    before = counted.counters()
    run(library)
    return {**with_checker.counters, **counted.executed(before, counted.counters())}


def measure(simulator: Simulator, name: str, launch: Launch, head_dim: int, dtype: str) -> Measured:
    simulator.set(map="apple", schedule="fifo")
    counts = counts_of(simulator, launch, head_dim, dtype, rising=False)
    moving = (
        counts_of(simulator, launch, head_dim, dtype, rising=True)
        if launch.kernel == "forward"
        else None
    )
    checked = compile_launch(simulator, launch)
    shape = Shape(
        block_rows=launch.block_rows,
        block_columns=launch.block_columns,
        simdgroups=launch.threads // 32,
        fragment="half" if launch.half_fragments else "float",
        useful=useful_slots(launch.kernel, head_dim),
    )
    size = checked.kernel(launch.kernel, launch.constants).static_threadgroup_bytes
    return Measured(name, shape, counts, moving, size)
