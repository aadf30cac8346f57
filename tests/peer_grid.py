"""Grids of other packages' tests: axes of values, of which a run takes a sample.

A grid is the product of its axes less what its rules exclude. FLASHATTN_PEERS says how many cases
of each grid run: a number, or "all", which takes days for the largest. Without it the sample is
small, and so are sequences and batches. The sample walks the product by a fixed stride near the
golden section of its size, so that any beginning of the walk meets every axis evenly.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

Axes = dict[str, Sequence[Any]]

WANTED = os.environ.get("FLASHATTN_PEERS", "")
IS_SMALL = not WANTED
SMALL_LENGTH = 1024
SMALL_SCORES = 1 << 15  # of one head


def sizes(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of pairs (seqlen_q, seqlen_k) those of this run."""
    small = (p for p in pairs if max(p) <= SMALL_LENGTH and math.prod(p) <= SMALL_SCORES)
    return list(small if IS_SMALL else pairs)


def lengths(values: Sequence[int]) -> list[int]:
    """Likewise of lengths that queries and keys share."""
    return [value for value in values if sizes([(value, value)])]


def batches(count: int) -> int:
    """Entries of the peer's batch; they only repeat each other, so a small run takes two."""
    return min(count, 2) if IS_SMALL else count


def walk(axes: Axes) -> Iterator[dict[str, Any]]:
    """Every element of the product once, in an order that wanders through all axes at once."""
    total = math.prod(len(values) for values in axes.values())
    stride = round(total * (math.sqrt(5) - 1) / 2)
    while math.gcd(stride, total) != 1:
        stride += 1
    for n in range(total):
        index, element = n * stride % total, {}
        for name, values in axes.items():
            index, place = divmod(index, len(values))
            element[name] = values[place]
        yield element


def sample(
    axes: Axes, count: int, is_case: Callable[[SimpleNamespace], bool] = lambda _: True
) -> list[SimpleNamespace]:
    """The cases of this run: `count` of them unless FLASHATTN_PEERS says otherwise, and then those
    that have a value of some axis for the first time.
    """
    wanted = None if WANTED == "all" else int(WANTED or count)
    missing = {(name, value) for name, values in axes.items() for value in values}
    chosen: list[SimpleNamespace] = []
    for element in walk(axes):
        case = SimpleNamespace(**element)
        if not is_case(case):
            continue
        if wanted is None or len(chosen) < wanted or missing & element.items():
            chosen.append(case)
            missing -= element.items()
        elif not missing:
            break
    assert not missing, f"the rules leave out {missing}"
    return chosen


def case_id(case: SimpleNamespace) -> str:
    """The values that are not off, as a test's id."""
    return ",".join(f"{n}={x}" for n, x in vars(case).items() if x).replace(" ", "")
