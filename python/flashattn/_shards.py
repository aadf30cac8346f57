"""How a sequence is shared among ranks, and which parts of it have anything to do with each other.

Plain Python: no tensors and no communication, so that work and bytes can be counted for any number
of ranks on one machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Sharding = Literal["contiguous", "zigzag"]


class Piece(NamedTuple):
    """Rows start..stop-1 of the whole sequence, which lie from row `local` on in their shard."""

    start: int
    stop: int
    local: int

    @property
    def rows(self) -> slice:
        """The piece within its shard."""
        return slice(self.local, self.local + self.stop - self.start)


def lengths(seqlen: int, ranks: int, sharding: Sharding) -> list[int]:
    """Rows of each rank's shard, as even as can be.

    Args:
        seqlen: rows of the whole sequence.
        ranks: number of shards.
        sharding: "contiguous" or "zigzag".

    Returns:
        One length per rank; they add up to seqlen.
    """
    parts = ranks if sharding == "contiguous" else 2 * ranks
    sizes = [seqlen // parts + (n < seqlen % parts) for n in range(parts)]
    if sharding == "contiguous":
        return sizes
    return [sizes[n] + sizes[2 * ranks - 1 - n] for n in range(ranks)]


def pieces(shards: Sequence[int], sharding: Sharding) -> list[list[Piece]]:
    """What each rank holds of the sequence, from the lengths of the shards alone.

    Contiguous shards follow one another. A zigzag shard is two pieces: with causal attention the
    first rows have little to do and the last ones much, so a rank takes as many of either. The
    first pieces follow one another, and the second ones behind them in the opposite order.

    Args:
        shards: rows of each rank's shard; they may differ and be 0.
        sharding: "contiguous" or "zigzag".

    Returns:
        Per rank the pieces in the order in which they lie in its shard.
    """
    if sharding == "contiguous":
        ends = np.cumsum([0, *shards]).tolist()
        return [[Piece(a, b, 0)] for a, b in pairwise(ends)]
    first = [(n + 1) // 2 for n in shards]
    sizes = first + [n - half for n, half in zip(shards, first, strict=True)][::-1]
    ends = np.cumsum([0, *sizes]).tolist()
    found = []
    for rank, half in enumerate(first):
        other = 2 * len(shards) - 1 - rank
        early = Piece(ends[rank], ends[rank + 1], 0)
        found.append([early, Piece(ends[other], ends[other + 1], half)])
    return found


@dataclass(frozen=True)
class Rules:
    """The whole problem's rules on positions, from which those of a pair of pieces follow.

    Attributes:
        seqlen_q: query rows of the whole sequence.
        seqlen_k: keys of the whole sequence.
        first: position of query row 0, one int or one per batch entry.
        k_offset: position of key 0.
        causal: whether keys behind a query are excluded.
        window: (left, right), -1 unlimited.
        kv_lengths: keys of each batch entry, or None.
    """

    seqlen_q: int
    seqlen_k: int
    first: Any
    k_offset: int
    causal: bool
    window: tuple[int, int]
    kv_lengths: Any

    @staticmethod
    def of(options: Mapping[str, Any], seqlen_q: int, seqlen_k: int) -> Rules:
        """Those of a call's options (docs/math.md: where a query row stands)."""
        kept = options.get("kv_lengths")
        kept = None if kept is None else np.asarray(kept, np.int64)
        first = options.get("q_offset")
        if first is not None:
            first = first if isinstance(first, int) else np.asarray(first, np.int64)
        elif options.get("causal") == "top_left":
            first = 0
        else:
            first = (seqlen_k if kept is None else kept) - seqlen_q
        return Rules(
            seqlen_q,
            seqlen_k,
            first,
            options.get("k_offset", 0),
            bool(options.get("causal", False)),
            tuple(options.get("window", (-1, -1))),
            kept,
        )

    def sees(self, q: Piece, k: Piece) -> bool:
        """Whether any query of `q` may see any key of `k`."""
        if q.start == q.stop or k.start == k.stop:
            return False
        if self.kv_lengths is not None and k.start >= self.kv_lengths.max(initial=0):
            return False
        latest = int(np.max(self.first)) + q.stop - 1
        earliest = int(np.min(self.first)) + q.start
        left, right = self.window
        right = 0 if self.causal and right < 0 else min(right, 0) if self.causal else right
        if right >= 0 and k.start + self.k_offset > latest + right:
            return False
        return not (left >= 0 and k.stop - 1 + self.k_offset < earliest - left)

    def options(self, q: Piece, k: Piece) -> dict[str, Any]:
        """The options of attention of `q` over `k` alone that make it a part of the whole."""
        found: dict[str, Any] = {
            "q_offset": self.first + q.start,
            "k_offset": self.k_offset + k.start,
        }
        if isinstance(self.first, np.ndarray):
            found["q_offset"] = np.ascontiguousarray(found["q_offset"])
        if self.kv_lengths is not None:
            found["kv_lengths"] = np.clip(self.kv_lengths - k.start, 0, k.stop - k.start)
        return found

    def visible(self, q: Piece, k: Piece) -> int:
        """How many scores of the pair are computed, for one batch entry and head."""
        rows = int(np.min(self.first)) + np.arange(q.start, q.stop)
        left, right = self.window
        right = 0 if self.causal else right
        low, high = k.start + self.k_offset, k.stop + self.k_offset
        begin = np.full(rows.shape, low) if left < 0 else np.maximum(rows - left, low)
        end = np.full(rows.shape, high) if right < 0 else np.minimum(rows + right + 1, high)
        return int(np.maximum(end - begin, 0).sum())


def pairs(mine: Sequence[Piece], theirs: Sequence[Piece]) -> Iterator[tuple[int, Piece, Piece]]:
    """(number of the query piece, query piece, key piece) of a ring's step."""
    for number, q in enumerate(mine):
        for k in theirs:
            yield number, q, k
