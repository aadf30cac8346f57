"""merge_attention of JAX arrays, in operations of JAX's own, which XLA fuses and differentiates.

Relies on `_merge` for layout and counts; checks shapes and dtypes itself, because no core does.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def merge(outs: list[Any], lses: list[Any], heads_first: bool) -> tuple[Any, Any]:
    """(out, lse) over the union of the parts' keys, in float32 and in their order."""
    _check(outs, lses, heads_first)
    top = functools.reduce(jnp.maximum, lses)
    top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))
    weights = [jnp.exp(lse - top) for lse in lses]
    total = functools.reduce(jnp.add, weights)
    seen = total > 0
    divisor = jnp.where(seen, total, 1.0)
    out = jnp.zeros(outs[0].shape, np.float32)
    for part, weight in zip(outs, weights, strict=True):
        share = (weight / divisor)[..., None]  # of (batch, heads, seqlen_q) rows
        if not heads_first:
            share = share.swapaxes(-3, -2)
        # A part that saw no key may hold anything.
        out += jnp.where(share > 0, part.astype(np.float32), 0.0) * share
    return out.astype(outs[0].dtype), jnp.where(seen, jnp.log(divisor) + top, -jnp.inf)


def _check(outs: list[Any], lses: list[Any], heads_first: bool) -> None:
    first = outs[0]
    if first.dtype not in (np.float32, np.float16, jnp.bfloat16):
        raise TypeError(
            f"merge_attention: outs[0].dtype ({first.dtype}) must be float32, float16 or bfloat16"
        )
    if first.ndim not in (3, 4):
        raise ValueError(f"merge_attention: outs[0].ndim ({first.ndim}) must be 4")
    rows = first.shape[:-1]
    rows = rows if heads_first else (*rows[:-2], rows[-1], rows[-2])
    for name, arrays, shape, dtype in (
        ("outs", outs, first.shape, first.dtype),
        ("lses", lses, rows, np.float32),
    ):
        for number, array in enumerate(arrays):
            label = f"merge_attention: {name}[{number}]"
            if array.dtype != dtype:
                raise TypeError(f"{label}.dtype ({array.dtype}) must be {np.dtype(dtype)}")
            if array.shape != shape:
                raise ValueError(f"{label}.shape ({array.shape}) must be {shape}")
