"""What a key costs in decode: the forward kernel over a chunk of keys, with one row of each of the
heads that share them. Writes nothing; record.py and test_cost_model.py use it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[n]) for n in (1, 0)]

from instructions import build
from measure import both_counts, difference, ordered_scores, translated
from model import FITS, LANES, Shape, residency, resources, slots
from register_cases import CONSTANT_IS_SPLIT, Register, run_chunks
from shader_cases import Case, Launch, compile_launch, make_tensors
from simulator import Simulator

BYTES = {"float32": 4, "float16": 2}


@dataclass(frozen=True)
class DecodeCosted:
    """A kernel of the host's choice (cpp/src/metal/tuning_register.cpp: choose_split)."""

    register: Register

    @property
    def heads(self) -> int:
        """That share a key: one a simdgroup."""
        return self.register.simdgroups

    @property
    def name(self) -> str:
        r = self.register
        return f"{r.dtype} D={r.head_tile}, {self.heads} heads share a key"


def decode_kernels() -> list[DecodeCosted]:
    return [
        DecodeCosted(Register("forward", 128, 128, dtype, 1, block, simdgroups, exchange="apple"))
        for dtype, block in (("float32", 16), ("float16", 32))
        for simdgroups in (1, 4)
    ]


def one_chunk(costed: DecodeCosted, keys: int) -> Case:
    """A problem that one threadgroup computes."""
    register = costed.register
    return Case(
        seqlen_q=1, seqlen_k=keys, query_heads=costed.heads, kv_heads=1, dtype=register.dtype,
        head_dim=register.head_tile, value_dim=register.value_tile, causal=False,
    )  # fmt: skip


def split_launch(costed: DecodeCosted) -> Launch:
    """With every function constant that the host sets."""
    constants = costed.register.constants_for(one_chunk(costed, 1), full=False)
    return costed.register.launch().with_constants({**constants, CONSTANT_IS_SPLIT: True})


def measure_decode(simulator: Simulator, costed: DecodeCosted, used: int) -> dict[str, Any]:
    """The row of one kernel, as recorded; `used` registers."""
    simulator.set(map="apple", schedule="fifo")
    register = costed.register
    launch = split_launch(costed)
    counted = build(translated(launch))
    library, checked = simulator.load(counted.path), compile_launch(simulator, launch)

    def run(blocks: int) -> dict[str, float]:
        keys = blocks * register.block
        case = one_chunk(costed, keys)
        tensors = make_tensors(case)
        ordered_scores(tensors, case, register.block, rising=False)
        return both_counts(
            counted, library, checked, lambda x: run_chunks(x, register, case, tensors, keys)
        )

    counts = difference(run)
    half = launch.half_fragments
    shape = Shape(8 * costed.heads, register.block, costed.heads, "half" if half else "float", 0)
    size = checked.kernel(launch.kernel, launch.constants).static_threadgroup_bytes
    resident = residency(shape, used, size)
    rows = shape.block_rows
    cycles = [rows * slots(counts, shape, used, size, fit) / LANES for fit in FITS.values()]
    issue = resources(counts, shape, resident, FITS["sharp"])[0] / register.block
    return {
        "registers": used,
        "threadgroup_bytes": size,
        "barriers_per_block": round(counts["threadgroup_barriers"], 3),
        "issue_cycles": round(issue, 2),
        "cycles": [round(min(cycles), 2), round(max(cycles), 2)],
        "bytes": (register.head_tile + register.value_tile) * BYTES[register.dtype],
    }


def decode_table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| kernel | registers | threadgroup bytes | barriers a block | issue, cycles a key "
        "| in all, cycles a key | bytes a key | bytes a cycle |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, r in rows.items():
        low, high = r["cycles"]
        lines.append(
            f"| {name} | {r['registers']} | {r['threadgroup_bytes']} "
            f"| {r['barriers_per_block']:.0f} | {r['issue_cycles']:.0f} "
            f"| {low:.0f}-{high:.0f} | {r['bytes']} "
            f"| {r['bytes'] / high:.1f}-{r['bytes'] / low:.1f} |"
        )
    return "\n".join(lines)
