"""The kernels whose cost is recorded: every design, at the head dimensions that models use."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parent.parent)]

from shader_cases import Case, Launch, staged


@dataclass(frozen=True)
class Costed:
    name: str
    launch: Launch
    head_dim: int
    dtype: str
    slack: float = 0.0  # of the running maximum, in powers of two: forward register kernels


def staged_kernels() -> list[Costed]:
    found = []
    for dim in (64, 128):
        for kernel in ("forward", "backward_dq", "backward_dv", "backward_dk"):
            launch = staged(Case(head_dim=dim, value_dim=dim), kernel)
            found.append(Costed(f"staged_{kernel} float32 D={dim}", launch, dim, "float32"))
    return found


def costed_kernels() -> list[Costed]:
    return staged_kernels()
