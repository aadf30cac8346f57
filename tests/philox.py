"""Philox4x32 and the dropout mask that every backend must reproduce bit for bit.

Relies on numpy's wrapping unsigned integers only. The numbering of elements is docs/math.md's: it
depends on the global (batch, head, query, key) coordinates, never on a tile, a shard or a thread.
Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


class DropoutShard(NamedTuple):
    """Where a call's scores lie in the global (heads x queries x keys) numbering."""

    global_heads: int
    head_start: int
    global_queries: int
    query_start: int
    global_keys: int
    key_start: int


def philox4x32(
    counter: tuple[NDArray[np.uint64], ...], key: tuple[int, int], rounds: int = 10
) -> tuple[NDArray[np.uint64], ...]:
    """Four 32-bit words (kept in uint64 arrays) for each 4 x 32-bit counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & 0xFFFFFFFF
        k1 = (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_units(index: NDArray[np.uint64], seed: int, offset: int = 0) -> NDArray[np.float64]:
    """The uniform number in [0, 1) of each global element index; exact multiples of 2^-24."""
    counter = np.uint64(offset & 0xFFFFFFFFFFFFFFFF) + (index >> np.uint64(2))
    zero = np.zeros_like(counter)
    words = philox4x32(
        (counter & _LOW, counter >> _HALF, zero, zero),
        (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF),
    )
    word = np.choose((index & np.uint64(3)).astype(np.intp), words)
    return (word >> np.uint64(8)).astype(np.float64) * 2.0**-24


def element_index(
    shape: tuple[int, int, int, int], shard: DropoutShard | None = None
) -> NDArray[np.uint64]:
    """Global index of each (batch, head, query, key) element; `shape` is the call's own."""
    batch, heads, queries, keys = shape
    at = shard or DropoutShard(heads, 0, queries, 0, keys, 0)
    b, h, i, j = (
        np.arange(n, dtype=np.uint64).reshape([-1 if axis == a else 1 for a in range(4)])
        for axis, n in enumerate((batch, heads, queries, keys))
    )
    row = b * np.uint64(at.global_heads) + np.uint64(at.head_start) + h
    row = row * np.uint64(at.global_queries) + np.uint64(at.query_start) + i
    return row * np.uint64(at.global_keys) + np.uint64(at.key_start) + j


def dropout_mask(
    shape: tuple[int, int, int, int],
    probability: float,
    seed: int,
    offset: int = 0,
    shard: DropoutShard | None = None,
) -> NDArray[np.float64]:
    """0 where a probability is dropped, 1 / (1 - p) where it is kept; (batch, heads, queries,
    keys).
    """
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"dropout probability ({probability}) must lie in [0, 1]")
    if probability == 1.0:
        return np.zeros(shape)
    kept = random_units(element_index(shape, shard), seed, offset) >= probability
    return kept / (1.0 - probability)
