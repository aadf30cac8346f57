"""Plain attention in numpy, O(T^2) in memory: the float64 truth and the same-dtype yardstick.

One head at a time, so that float64 stays affordable. It knows the options that `check` uses: scale,
causal, window, key lengths and offsets. The tests have their own oracle of every rule; this one is
for people who have only the installed package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, np.dtype[Any]]


NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Results:
    """out and the gradients in their inputs' shapes, lse (batch, heads, seqlen_q)."""

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array


def visible(seqlen_q: int, seqlen_k: int, length: int, options: dict[str, Any]) -> Array:
    """Which keys each row sees, (seqlen_q, seqlen_k) bool, for a batch entry of `length` keys."""
    causal, (left, right) = options.get("causal", False), options.get("window", (-1, -1))
    rows = np.arange(seqlen_q)[:, None]
    keys = np.arange(seqlen_k)[None, :]
    if "q_offset" in options:
        at = rows + options["q_offset"] - options.get("k_offset", 0)
    else:
        at = rows if causal == "top_left" else rows + length - seqlen_q
    seen = np.broadcast_to(keys < length, (seqlen_q, seqlen_k))
    if causal:
        seen = seen & (keys <= at)
    if left >= 0:
        seen = seen & (keys >= at - left)
    if right >= 0:
        seen = seen & (keys <= at + right)
    return seen


def attention(
    arrays: tuple[Array, ...],
    options: dict[str, Any],
    dtype: Any = np.float64,
    from_lse: bool = False,
) -> Results:
    """Forward and backward on (query, key, value, dout), each (batch, seqlen, heads, dim).

    dtype float64 is the truth. Another dtype is plain code in that dtype: each matrix product is
    accumulated in float32 and rounded to it, as an unfused implementation does. from_lse: gradients
    start from weights exp(scores - lse), lse stored in float32, instead of those of the forward.
    """
    query, key, value, dout = arrays
    compute: Any = np.float64 if dtype == np.float64 else np.float32

    def rounded(x: Array) -> Array:
        return x if dtype == compute else x.astype(dtype).astype(compute)

    batch, seqlen_q, heads, head_dim = query.shape
    group = heads // key.shape[2]
    scale = compute(options.get("scale", head_dim**-0.5))
    lengths = options.get("kv_lengths", [key.shape[1]] * batch)
    out = np.zeros((*query.shape[:3], value.shape[3]), compute)
    lse = np.zeros((batch, heads, seqlen_q), compute)
    dq, dk, dv = (np.zeros(x.shape, compute) for x in (query, key, value))
    for b in range(batch):
        seen = visible(seqlen_q, key.shape[1], lengths[b], options)
        for h in range(heads):
            q, do = query[b, :, h].astype(compute), dout[b, :, h].astype(compute)
            k, v = (x[b, :, h // group].astype(compute) for x in (key, value))
            one = _one_head((q, k, v, do), seen, scale, rounded, from_lse)
            out[b, :, h], lse[b, h], dq[b, :, h] = one.out, one.lse, one.dq
            dk[b, :, h // group] += one.dk
            dv[b, :, h // group] += one.dv
    return Results(out, lse, dq, rounded(dk), rounded(dv))


def _one_head(
    arrays: tuple[Array, ...],
    seen: Array,
    scale: Any,
    rounded: Callable[[Array], Array],
    from_lse: bool,
) -> Results:
    q, k, v, do = arrays
    scores = np.where(seen, rounded(rounded(q * scale) @ k.T), -np.inf)
    alive = seen.any(axis=-1, keepdims=True)
    top = np.where(alive, scores.max(axis=-1, keepdims=True, initial=-np.inf), 0)
    weights = np.exp(scores - top)
    total = np.where(alive, weights.sum(axis=-1, keepdims=True), 1)
    p = rounded(weights / total)
    out = rounded(p @ v)
    lse = np.where(alive, top + np.log(total), -np.inf)[:, 0]
    if from_lse:
        stored = np.where(np.isneginf(lse), 0, lse).astype(np.float32).astype(scores.dtype)
        p = rounded(np.exp(scores - stored[:, None]))
    dp = rounded(do @ v.T)
    ds = rounded(p * (dp - (p * dp).sum(axis=-1, keepdims=True)))
    return Results(
        out=out,
        lse=lse,
        dq=rounded(rounded(ds @ k) * scale),
        dk=rounded(ds.T @ rounded(q * scale)),
        dv=rounded(p.T @ do),
    )


def worst_error(got: Array, truth: Array) -> float:
    """Largest |got - truth|; equal infinities agree, and a NaN or a lone infinity gives inf."""
    exact = np.asarray(truth, np.float64)
    mine = np.asarray(got).astype(np.float64)
    if exact.size == 0:
        return 0.0
    with np.errstate(invalid="ignore"):
        distance = np.where(mine == exact, 0.0, np.abs(mine - exact))
    return float(np.where(np.isnan(distance), np.inf, distance).max())


def plain_errors(
    arrays: tuple[Array, ...], options: dict[str, Any], dtype: Any, truth: Results
) -> dict[str, float]:
    """For each result the larger error of the two plain ways to it in dtype."""
    ways = [attention(arrays, options, dtype, from_lse) for from_lse in (False, True)]
    return {
        name: max(worst_error(getattr(way, name), getattr(truth, name)) for way in ways)
        for name in NAMES
    }


def allowed_error(name: str, truth: Array, yardstick: float, dtype: Any) -> float:
    """Returns factor * the plain error + 2 * what storing the truth in dtype costs.

    The rule of docs/tolerances.md: factor is 2 for results and 3 for gradients.
    """
    factor = 2 if name in ("out", "lse") else 3
    finite = np.asarray(truth, np.float64)[np.isfinite(truth)].astype(dtype)
    third = np.asarray(0.3, dtype)
    moved = ((finite + third).astype(dtype) - third).astype(dtype)
    return factor * yardstick + 2 * worst_error(moved, finite)
