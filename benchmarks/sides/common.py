"""What every side needs: random arrays, and the sizes of a cell by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from cells import kv_heads_of

Call = Callable[[], object]


class Sizes(NamedTuple):
    """Of query, key and value; a decode cell is a batch of one with one query row."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int

    @property
    def is_grouped(self) -> bool:
        """Whether query heads share key heads."""
        return self.heads != self.kv_heads

    def bshd(self) -> list[tuple[int, ...]]:
        """Shapes of query, key, value and the gradient of out."""
        query = (self.batch, self.seqlen_q, self.heads, self.head_dim)
        key = (self.batch, self.seqlen_k, self.kv_heads, self.head_dim)
        return [query, key, key, query]

    def bhsd(self) -> list[tuple[int, ...]]:
        """The same with the heads axis before the sequence."""
        return [(b, h, s, d) for b, s, h, d in self.bshd()]


def sizes_of(cell: dict[str, Any]) -> Sizes:
    if cell["pass"] == "decode":
        heads, kv_heads, seqlen, head_dim = cell["shape"]
        return Sizes(1, heads, kv_heads, 1, seqlen, head_dim)
    batch, heads, seqlen, head_dim = cell["shape"]
    return Sizes(batch, heads, kv_heads_of(cell), seqlen, seqlen, head_dim)


def random(dtype: str, *shapes: tuple[int, ...]) -> list[Any]:
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(shape, np.float32) for shape in shapes]
    if dtype == "bfloat16":
        import ml_dtypes

        return [x.astype(ml_dtypes.bfloat16) for x in arrays]
    return [x.astype(dtype) for x in arrays]
