"""The kernels whose cost is recorded: every design, at the head dimensions that models use."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[n]) for n in (1, 2)]

from register_cases import Register
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
    for dim in (64, 128, 256):
        for kernel in ("forward", "backward_dq", "backward_dv", "backward_dk"):
            launch = staged(Case(head_dim=dim, value_dim=dim), kernel)
            found.append(Costed(f"staged_{kernel} float32 D={dim}", launch, dim, "float32"))
    return found


# Instances by head dimension: those for Apple's lane map, and the forward kernel for any map.
APPLE = {"exchange": "apple"}
WIDE = {"row_fragments": 2, "block": 32, "simdgroups": 4}
WIDEST = {"block": 8, "simdgroups": 8, "held": False, "value_held": False}
REGISTER = {
    64: [
        ("forward", "float32", {**WIDE, **APPLE}),
        ("forward", "float32", {"block": 32, "simdgroups": 8}),
        ("forward", "float16", {**WIDE, **APPLE}),
        ("forward", "bfloat16", {**WIDE, **APPLE}),
        ("backward_dq", "float32", {"block": 32, "simdgroups": 8, **APPLE}),
        ("backward_dq", "float16", {"block": 32, "simdgroups": 8, **APPLE}),
        ("backward_dkv", "float32", {"block": 16, "simdgroups": 4}),
        ("backward_dkv", "float16", {"block": 16, "simdgroups": 4}),
    ],
    128: [
        (
            "forward",
            "float32",
            {"row_fragments": 2, "block": 16, "simdgroups": 8, "held": False, **APPLE},
        ),
        ("forward", "float32", {"block": 16, "simdgroups": 8}),
        ("forward", "float16", {"block": 32, "simdgroups": 8, **APPLE}),
        ("backward_dq", "float32", {"block": 16, "simdgroups": 8, "value_held": False, **APPLE}),
        ("backward_dq", "float16", {"block": 32, "simdgroups": 8, **APPLE}),
        ("backward_dv", "float32", {"block": 16, "simdgroups": 8, **APPLE}),
        ("backward_dk", "float32", {"block": 16, "simdgroups": 8, "value_held": False, **APPLE}),
        ("backward_dv", "float16", {"block": 32, "simdgroups": 8, **APPLE}),
        ("backward_dk", "float16", {"block": 16, "simdgroups": 8, **APPLE}),
    ],
    256: [
        ("forward", "float32", {**WIDEST, **APPLE}),
        ("forward", "float16", {**WIDEST, "block": 16, **APPLE}),
        ("forward", "bfloat16", {**WIDEST, **APPLE}),
        ("backward_dq", "float32", {**WIDEST, **APPLE}),
        ("backward_dv", "float32", {**WIDEST, **APPLE}),
        ("backward_dk", "float32", {**WIDEST, **APPLE}),
        ("backward_dq", "float16", {**WIDEST, "block": 16, **APPLE}),
        ("backward_dv", "float16", {**WIDEST, **APPLE}),
        ("backward_dk", "float16", {**WIDEST, **APPLE}),
    ],
}
SLACK = 8.0  # as cpp/src/metal/tuning.h has it


def register_kernels() -> list[Costed]:
    found = []
    for dim, instances in REGISTER.items():
        for kernel, dtype, settings in instances:
            register = Register(kernel, dim, dim, dtype, **settings)
            name = f"register_{kernel} {dtype} D={dim}, {register.exchange} map"
            found.append(Costed(name, register.launch(), dim, dtype, SLACK))
    return found


def costed_kernels() -> list[Costed]:
    return [*staged_kernels(), *register_kernels()]
