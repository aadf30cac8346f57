"""For MLX's users: scaled_dot_product_attention as mx.fast spells it, with a gradient.

`flashattn.attention` itself takes MLX arrays, with every option, under mx.grad, mx.value_and_grad,
mx.vjp and mx.checkpoint. It evaluates its inputs when it is called, so inside mx.compile and
mx.vmap MLX raises ValueError ("Attempting to eval an array during function transformations"): call
it outside of compiled functions. Importing this module imports mlx.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from flashattn._api import attention

__all__ = ["scaled_dot_product_attention"]

_SDPA = "scaled_dot_product_attention"


def scaled_dot_product_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float,
    mask: str | Any | None = None,
    sinks: Any = None,
    force_fused: bool = False,
    stream: Any = None,
) -> Any:
    """mx.fast.scaled_dot_product_attention, computed here; differentiable, mask and sinks too.

    A row that sees no key gives 0, where MLX gives the mean of the values or NaN.

    Args:
        q: (batch, query_heads, seqlen_q, head_dim). Arrays of different dtypes are promoted.
        k: (batch, kv_heads, seqlen_k, head_dim); kv_heads divides query_heads.
        v: (batch, kv_heads, seqlen_k, value_dim).
        scale: factor on the scores.
        mask: "causal" (the last query sees the last key), or an array broadcastable to
            (batch, query_heads, seqlen_q, seqlen_k): bool, True attends, or floating, added.
        sinks: floating (query_heads,), one extra logit each in the softmax's denominator.
        force_fused: accepted; there is no other kernel.
        stream: accepted; the result is finished when the call returns.

    Returns:
        (batch, query_heads, seqlen_q, value_dim) in the promoted dtype.

    Raises:
        ValueError: shapes that do not fit, another word than "causal"; inside mx.compile or
            mx.vmap.
        TypeError: dtypes other than float32, float16, bfloat16.
    """
    dtype = functools.reduce(_promoted, (x.dtype for x in (q, k, v)))
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    options: dict[str, Any] = {"scale": scale, "layout": "bhsd"}
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f'{_SDPA}: mask ({mask!r}) must be "causal" or an array')
        options["causal"] = True
    elif mask is not None:
        options["mask"] = mask
    if sinks is not None:
        options["sinks"] = sinks.astype(mx.float32)
    return attention(q, k, v, **options)


def _promoted(one: Any, other: Any) -> Any:
    """MLX's promotion of two dtypes, which it shows only through arrays."""
    if one == other:
        return one
    return (mx.zeros((), one) + mx.zeros((), other)).dtype
