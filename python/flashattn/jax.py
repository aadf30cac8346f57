"""For JAX's users: dot_product_attention as jax.nn spells it.

`flashattn.attention` itself takes JAX arrays, with every option: under jit, grad, vmap, checkpoint,
scan and shard_map, on JAX's CPU devices. In a program that is partitioned without shard_map XLA
gathers the arrays of a call on every device; docs/jax.md has the recipes that keep them apart.
Forking a process that has used JAX is not safe, whatever this package does. Importing this module
imports jax.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from flashattn import _jax  # noqa: F401 - registers the FFI targets, for exported programs
from flashattn._api import attention

__all__ = ["dot_product_attention"]

_FUNCTION = "dot_product_attention"


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> Any:
    """jax.nn.dot_product_attention, computed here.

    Causal masks and windows align top-left: query row i stands at key i. Differentiable in query,
    key, value and bias. Otherwise than in jax.nn, a row that sees no key gives 0 (theirs gives the
    mean of the values, or NaN), value may have another dimension than key, and -1 as a side of the
    window is no limit. bias and mask together are one array of the shape to which they broadcast;
    alone each is read in its own shape.

    Args:
        query: (batch, seqlen_q, query_heads, head_dim), or without the batch axis.
        key: (batch, seqlen_k, kv_heads, head_dim), likewise; kv_heads divides query_heads.
        value: (batch, seqlen_k, kv_heads, value_dim), likewise.
        bias: floating, added to the scaled scores, broadcastable to
            (batch, query_heads, seqlen_q, seqlen_k).
        mask: bool, True attends, broadcastable to the same.
        scale: default head_dim ** -0.5.
        is_causal: row i sees keys 0..i.
        query_seq_lengths: int32 (batch,): rows from there on give 0 and have no gradient.
        key_value_seq_lengths: int32 (batch,): keys from there on do not exist.
        local_window_size: (left, right) inclusive distances, or one for both.
        implementation: None. There is one here, and the others are jax.nn's.
        return_residual: also return the log-sum-exp, through which no gradient flows (one does
            through that of `flashattn.attention`).

    Returns:
        out, (batch, seqlen_q, query_heads, value_dim) in query's dtype; with return_residual
        (out, residual), the residual (batch, seqlen_q, query_heads) in query's dtype. Without the
        batch axis if query has none.

    Raises:
        ValueError: shapes that do not fit, windows below -1.
        TypeError: dtypes other than float32, float16, bfloat16, or that differ.
        NotImplementedError: implementation is given.
    """
    if implementation is not None:
        raise NotImplementedError(f"{_FUNCTION}: implementation ({implementation!r}) must be None")
    query = jnp.asarray(query)
    unbatched = query.ndim == 3
    query, key, value = (_four_axes(x) for x in (query, key, value))
    options: dict[str, Any] = {"scale": scale, "mask": _one_mask(bias, mask)}
    if is_causal or local_window_size is not None:
        options["q_offset"] = 0
    if is_causal:
        options["causal"] = True
    if local_window_size is not None:
        one = isinstance(local_window_size, int)
        options["window"] = (local_window_size,) * 2 if one else local_window_size
    if key_value_seq_lengths is not None:
        lengths = jnp.asarray(key_value_seq_lengths)
        options["kv_lengths"] = jnp.clip(lengths, 0, key.shape[1])
    exists = None
    if query_seq_lengths is not None:
        rows = jnp.arange(query.shape[1])[None, :]
        exists = (rows < jnp.asarray(query_seq_lengths)[:, None])[:, :, None]
        # Padding may hold anything, and must not reach the gradients of keys and values.
        query = jnp.where(exists[..., None], query, jnp.zeros((), query.dtype))
    out, lse = attention(query, key, value, return_lse=True, **options)
    if exists is not None:
        out = jnp.where(exists[..., None], out, jnp.zeros((), out.dtype))
    out = out[0] if unbatched else out
    if not return_residual:
        return out
    residual = jax.lax.stop_gradient(lse).swapaxes(1, 2)
    if exists is not None:
        residual = jnp.where(exists, residual, -jnp.inf)
    residual = residual.astype(out.dtype)
    return out, residual[0] if unbatched else residual


def _four_axes(array: Any) -> Any:
    array = jnp.asarray(array)
    return array[None] if array.ndim == 3 else array


def _one_mask(bias: Any, mask: Any) -> Any:
    """The bias where mask is True, else excluded; either alone as it is."""
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.dtype != np.bool_:
            raise TypeError(f"{_FUNCTION}: mask.dtype ({mask.dtype}) must be bool")
    if bias is None:
        return mask
    bias = jnp.asarray(bias)
    if not jnp.issubdtype(bias.dtype, np.floating):
        raise TypeError(f"{_FUNCTION}: bias.dtype ({bias.dtype}) must be floating")
    return bias if mask is None else jnp.where(mask, bias, jnp.asarray(-jnp.inf, bias.dtype))
