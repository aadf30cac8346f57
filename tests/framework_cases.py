"""Problems that the tests of JAX and of MLX share: each option by itself, and all of them."""

from __future__ import annotations

from typing import Any

from cases import Case

SIZES: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen_q": 19, "seqlen_k": 23}
CASES = {
    "plain": Case(**SIZES),
    "float16": Case(**SIZES, dtype="float16", causal=True),
    "bfloat16": Case(**SIZES, dtype="bfloat16", causal="top_left", value_dim=8),
    "window": Case(**SIZES, window=(5, 2), scale=-0.3),
    "offsets": Case(**SIZES, causal=True, q_offset=3, k_offset=1),
    "offset per entry": Case(**SIZES, causal=True, q_offset=(0, 9), kv_lengths=(23, 7)),
    "bool mask": Case(**SIZES, mask="bool"),
    "additive mask": Case(**SIZES, mask="additive_keys", causal=True),
    "holes": Case(**SIZES, mask="holes", softcap=2.0),
    "alibi": Case(**SIZES, alibi="batch", causal=True),
    "sinks": Case(**SIZES, sinks=True, window=(4, 0)),
    "dropout": Case(**SIZES, dropout_p=0.3),
    "everything": Case(
        **SIZES,
        causal=True,
        window=(9, -1),
        softcap=3.0,
        mask="additive",
        alibi="head",
        sinks=True,
        dropout_p=0.2,
        q_offset=5,
        kv_lengths=(20, 23),
    ),
}
ARRAYS = ("mask", "alibi_slopes", "sinks")  # options that have a gradient
