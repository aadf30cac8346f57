"""dropout_mask: the weights that a call drops, without the call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flashattn import _core
from flashattn._options import DropoutShard, parse, sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_FUNCTION = "dropout_mask"


def dropout_mask(
    shape: Sequence[int],
    p: float,
    seed: int,
    dropout_offset: int = 0,
    dropout_shard: DropoutShard | None = None,
) -> NDArray[np.float32]:
    """The factors by which a call with these scores multiplies its probabilities.

    Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in the
    numbering of docs/math.md: the same bits on every backend, whatever the tiles, shards and
    threads.

    Args:
        shape: (batch, query_heads, seqlen_q, seqlen_k) of the call.
        p: probability of dropping a weight, 0..1; `dropout_p` of the call.
        seed: its `dropout_seed`.
        dropout_offset: as in the call.
        dropout_shard: as in the call.

    Returns:
        float32 array of `shape`: 0 where the weight is dropped, 1 / (1 - p) where it stays.

    Raises:
        ValueError: p outside 0..1 or NaN, a shape that is not four sizes, a shard that does not
            hold it.
        TypeError: an argument of the wrong kind.
    """
    given: dict[str, Any] = {
        "dropout_p": p,
        "dropout_seed": seed,
        "dropout_offset": dropout_offset,
        "dropout_shard": dropout_shard,
    }
    options = parse(_FUNCTION, given)
    mask = np.empty(sizes(_FUNCTION, "shape", shape, 4), np.float32)
    _core.dropout_mask(mask, options)
    return mask
