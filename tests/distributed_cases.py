"""Problems for context parallelism: shared by the test, which knows the oracle, and by the
processes that compute them (distributed_worker.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Case:
    """One call on all ranks. Options that are arrays are drawn in `arrays`."""

    name: str
    seqlen_q: int = 45
    seqlen_k: int = 45
    dtype: str = "float32"
    heads: int = 4
    kv_heads: int = 2
    value_dim: int = 16
    options: tuple[tuple[str, Any], ...] = ()
    alibi: bool = False
    sinks: bool = False
    uneven: bool = False  # shards of lengths that no rule gives, one of them empty

    def arrays(self) -> dict[str, NDArray[Any]]:
        """query, key, value, dout and dlse of the whole problem, (batch, seqlen, heads, dim)."""
        rng = np.random.default_rng(11)

        def normal(*shape: int) -> NDArray[Any]:
            return rng.standard_normal(shape).astype(np.float32)

        found = {
            "query": normal(2, self.seqlen_q, self.heads, 16),
            "key": normal(2, self.seqlen_k, self.kv_heads, 16),
            "value": normal(2, self.seqlen_k, self.kv_heads, self.value_dim),
            "dout": normal(2, self.seqlen_q, self.heads, self.value_dim),
            "dlse": normal(2, self.heads, self.seqlen_q),
        }
        if self.alibi:
            found["alibi_slopes"] = rng.uniform(0.01, 0.5, self.heads).astype(np.float32)
        if self.sinks:
            found["sinks"] = normal(self.heads)
        return found

    @property
    def used(self) -> list[str]:
        """Options that a backend may lack."""
        names = [name for name, _ in self.options if name in ("softcap", "dropout_p")]
        return names + ["alibi_slopes"] * self.alibi + ["sinks"] * self.sinks


CAUSAL = (("causal", True),)
WINDOW = (("causal", True), ("window", (9, 0)))
DROPOUT = (("dropout_p", 0.3), ("dropout_seed", 77))
CASES = [
    Case("plain"),
    Case("causal", options=CAUSAL),
    Case("top_left", seqlen_q=20, options=(("causal", "top_left"),)),
    Case("more_keys", seqlen_q=20, seqlen_k=61, options=CAUSAL),
    Case("dead_rows", seqlen_q=61, seqlen_k=20, options=CAUSAL),
    Case("window", options=WINDOW, value_dim=8),
    Case("both_sides", options=(("window", (7, 5)),)),
    Case("bfloat16", dtype="bfloat16", options=CAUSAL),
    Case("float16", dtype="float16", options=WINDOW),
    Case("lengths", options=(*CAUSAL, ("kv_lengths", (45, 17)))),
    Case("offsets", seqlen_q=20, options=(*CAUSAL, ("q_offset", 19), ("k_offset", 3))),
    Case("short", seqlen_q=3, seqlen_k=3, options=CAUSAL),
    Case("uneven", options=CAUSAL, uneven=True),
    Case("many_heads", heads=6, kv_heads=1, options=(*CAUSAL, ("scale", 0.4))),
    Case("alibi", options=CAUSAL, alibi=True),
    Case("alibi_more_keys", seqlen_q=20, alibi=True, options=WINDOW),
    Case("softcap", options=(*CAUSAL, ("softcap", 2.0))),
    Case("sinks", options=WINDOW, sinks=True),
    Case("sinks_dead_rows", seqlen_q=61, seqlen_k=20, options=CAUSAL, sinks=True),
    Case("dropout", options=(*CAUSAL, *DROPOUT)),
    Case(
        "everything",
        options=(*WINDOW, *DROPOUT, ("softcap", 3.0)),
        alibi=True,
        sinks=True,
        uneven=True,
    ),
]
MODES = [(m, s) for m in ("ring", "all_gather") for s in ("contiguous", "zigzag")]


def uneven_lengths(seqlen: int, ranks: int) -> list[int]:
    """The second rank has nothing, the last one the rest."""
    found = [seqlen // 5] * ranks
    found[1] = 0
    found[-1] = seqlen - sum(found[:-1])
    return found
