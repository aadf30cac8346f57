"""From counts to time, for a core like that of Apple's M1 GPU: four schedulers of 32 lanes.

The unit is the slot, one lane-instruction per score element; a core retires 128 slots a cycle. Five
resources each give a time, and a p-norm joins them:

    issue     instructions of all simdgroups of a threadgroup over four schedulers
    memory    bytes through threadgroup memory, and matrix fragments read from the device
    device    bytes between core and device memory
    complex   the slow pipe: exp2, integer products, shifts, conversions
    latency   the serial phases of one threadgroup over the threadgroups that fit on a core

Rates: public measurements of the M1 (philipturner/metal-benchmarks, dougallj/applegpu). The three
free numbers were fitted to the 18 utilisations that metal-flash-attention publishes for its own
kernels on an M1 Max, once with a sharp and once with a soft norm; a prediction is the range of the
two. docs/metal-performance.md says what that is worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Issue slots of a simdgroup per instruction class (instructions.py).
ISSUE = {"float": 1, "select": 1, "integer": 1, "integer64": 3, "multiply": 1, "multiply64": 3}
ISSUE |= {"shift_left": 1, "shift_right": 1, "divide": 8, "convert": 1, "special": 1}
ISSUE |= {"branch": 1, "address": 1}
# Cycles of the complex pipe.
COMPLEX = {"multiply": 4, "multiply64": 8, "shift_left": 2, "shift_right": 4, "divide": 16}
COMPLEX |= {"convert": 4, "special": 4, "integer64": 1}

MULTIPLY_CYCLES = {"float": 18, "half": 17}  # one 8x8x8 product
VOTE, SIMDGROUP_BARRIER, SHUFFLE, THREADGROUP_BARRIER = 5, 4, 2, 8
SCHEDULERS, LANES = 4, 128
DEVICE_BYTES_PER_CYCLE = 32
REGISTER_FILE, THREADGROUP_MEMORY, SIMDGROUPS = 208 * 1024, 60 * 1024, 96  # of a core
MOST_REGISTERS = 128
# Cycles of a tile's serial phases besides barriers and matrix products.
SERIAL, SERIAL_BARRIER = 500, 30


@dataclass(frozen=True)
class Fit:
    threadgroup_bytes_per_cycle: float
    norm: float
    fragment_issue: float  # slots of a matrix load or store


FITS = {"sharp": Fit(64, 8, 1.5), "soft": Fit(96, 3, 1.0)}


@dataclass(frozen=True)
class Shape:
    """What the model has to know about a kernel besides its counts."""

    block_rows: int
    block_columns: int
    simdgroups: int
    fragment: str  # "float" or "half"
    useful: float  # slots that metal-flash-attention counts as useful


def residency(shape: Shape, registers: int, threadgroup_bytes: int) -> int:
    """Threadgroups that a core holds at a time."""
    per_simdgroup = min(registers, MOST_REGISTERS) * LANES
    by_registers = REGISTER_FILE // (per_simdgroup * shape.simdgroups)
    by_memory = THREADGROUP_MEMORY // max(threadgroup_bytes, 1)
    return max(1, min(by_registers, by_memory, SIMDGROUPS // shape.simdgroups))


def resources(counts: Mapping[str, float], shape: Shape, resident: int, fit: Fit) -> list[float]:
    """Cycles of one tile, by resource. `counts` are of the whole threadgroup."""
    cycles = MULTIPLY_CYCLES[shape.fragment]
    fragments = sum(v for k, v in counts.items() if k.startswith(("matrix_loads", "matrix_stores")))
    scalars = sum(v for k, v in counts.items() if k.startswith(("scalar_loads", "scalar_stores")))
    special = (counts["exponentials"] + counts["logarithms"]) / 32
    issue = counts["matrix_multiplies"] * cycles + fragments * fit.fragment_issue + scalars / 32
    issue += sum(ISSUE[name] * counts.get(name, 0) for name in ISSUE) / 32 + special
    issue += VOTE * counts["votes"] + SHUFFLE * counts["shuffles"]
    issue += SIMDGROUP_BARRIER * counts["simdgroup_barriers"]
    issue += THREADGROUP_BARRIER * shape.simdgroups * counts["threadgroup_barriers"]
    slow = sum(COMPLEX[name] * counts.get(name, 0) for name in COMPLEX) / 32 + 4 * special
    on_core = counts["matrix_bytes_threadgroup"] + counts["scalar_bytes_threadgroup"]
    on_core += counts["matrix_bytes_device"]
    device = counts["matrix_bytes_device"] + counts["scalar_bytes_device"]
    serial = SERIAL + SERIAL_BARRIER * counts["threadgroup_barriers"]
    serial += counts["matrix_multiplies"] / shape.simdgroups * cycles
    return [
        issue / SCHEDULERS,
        on_core / fit.threadgroup_bytes_per_cycle,
        device / DEVICE_BYTES_PER_CYCLE,
        slow / SCHEDULERS,
        serial / resident,
    ]


def slots(
    counts: Mapping[str, float], shape: Shape, registers: int, threadgroup_bytes: int, fit: Fit
) -> float:
    """Lane-instructions per score element."""
    resident = residency(shape, registers, threadgroup_bytes)
    times = resources(counts, shape, resident, fit)
    cycles = sum(time**fit.norm for time in times) ** (1 / fit.norm)
    return cycles * LANES / (shape.block_rows * shape.block_columns)


def slow_share(rows: int, block: int, length: int, slack: float) -> float:
    """How often a simdgroup of `rows` rows meets a new maximum, over length/block blocks of random
    scores: the chance that the largest of k blocks is the last one, for any of the rows. With a
    slack a maximum has to rise by that much: rarely after the first block (measured: 0.03 of that).
    """
    blocks = length // block
    share = sum(1 - (1 - 1 / k) ** rows for k in range(1, blocks + 1)) / blocks
    return share if slack == 0 else max(1 / blocks, 0.03 * share)
