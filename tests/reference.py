"""The float64 oracle: every rule of docs/math.md, written for reading and not for speed.

Arrays are (batch, seqlen, heads, dim) like the package's default layout; masks, probabilities and
LSE are (batch, heads, ...). Everything is computed in float64 on the whole score matrix. Positions
that a row may not see are selected away, never multiplied by zero, so NaN there cannot spread.
Relies on numpy and tests/philox.py; test_reference.py checks it against finite differences, torch
in float64 and known answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from philox import DropoutShard, dropout_mask

__all__ = [
    "Array",
    "DropoutShard",
    "Gradients",
    "Options",
    "Result",
    "attention",
    "attention_backward",
    "dropout_mask",
    "positions",
    "select_matmul",
    "visibility",
]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Options:
    """The options of a call, named as the package names them."""

    scale: float | None = None
    causal: bool | str = False
    window: tuple[int, int] = (-1, -1)
    mask: Any = None
    softcap: float = 0.0
    alibi_slopes: Any = None
    sinks: Any = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    dropout_offset: int = 0
    dropout_shard: DropoutShard | None = None
    q_offset: int | Sequence[int] | None = None
    k_offset: int = 0
    kv_lengths: Sequence[int] | None = None


@dataclass
class Result:
    """What forward computes, and the parts that backward needs again. S is (B, H, Tq, Tk)."""

    out: Array  # (B, Tq, H, Dv)
    lse: Array  # (B, H, Tq), natural log
    probabilities: Array  # before dropout; 0 where excluded
    visible: NDArray[np.bool_]
    keep: Array  # the dropout factor: 0 or 1 / (1 - p)
    capped: Array  # d(softcap(s)) / ds
    distance: Array  # |row position - key position|, (B, 1, Tq, Tk)
    sink_probability: Array  # (B, H, Tq)
    scale: float = field(default=1.0)


@dataclass
class Gradients:
    dq: Array
    dk: Array
    dv: Array
    dmask: Array | None = None
    dalibi_slopes: Array | None = None
    dsinks: Array | None = None


def positions(
    batch: int, seqlen_q: int, seqlen_k: int, options: Options
) -> tuple[NDArray, NDArray, NDArray]:
    """Row positions (B, Tq), key positions (Tk,) and key counts (B,), all int64."""
    lengths = np.full(batch, seqlen_k, np.int64)
    if options.kv_lengths is not None:
        lengths = np.asarray(options.kv_lengths, np.int64)
    if options.q_offset is not None:
        first = np.broadcast_to(np.asarray(options.q_offset, np.int64), (batch,))
    elif options.causal == "top_left":
        first = np.zeros(batch, np.int64)
    else:
        first = lengths - seqlen_q
    rows = first[:, None] + np.arange(seqlen_q, dtype=np.int64)
    return rows, np.arange(seqlen_k, dtype=np.int64) + options.k_offset, lengths


def visibility(batch: int, seqlen_q: int, seqlen_k: int, options: Options) -> NDArray[np.bool_]:
    """Which key each row may see by causal, window, offsets and lengths: (B, 1, Tq, Tk). Masks are
    apart.
    """
    rows, keys, lengths = positions(batch, seqlen_q, seqlen_k, options)
    at, key = rows[:, None, :, None], keys[None, None, None, :]
    left, right = options.window
    visible = np.broadcast_to(
        np.arange(seqlen_k)[None, None, None, :] < lengths[:, None, None, None],
        (batch, 1, seqlen_q, seqlen_k),
    ).copy()
    if options.causal:
        visible &= key <= at
    if left >= 0:
        visible &= key >= at - left
    if right >= 0:
        visible &= key <= at + right
    return visible


def select_matmul(weights: Array, values: Array, allowed: NDArray[np.bool_]) -> Array:
    """sum_n weights[..., m, n] * values[..., n, d] over the allowed (m, n) alone, whatever the
    others hold.
    """
    weights = np.where(allowed, weights, 0.0)
    finite = np.isfinite(values).all(axis=-1)
    if finite.all():
        return weights @ values
    total = weights @ np.where(finite[..., None], values, 0.0)
    for n in np.unique(np.nonzero(~finite)[-1]):
        bad = ~finite[..., n, None, None]
        term = weights[..., n, None] * values[..., n, None, :]
        total = total + np.where(bad & allowed[..., n, None], term, 0.0)
    return total


def _heads_first(x: ArrayLike) -> Array:
    return np.asarray(x).astype(np.float64).transpose(0, 2, 1, 3)


def _expand(x: Array, heads: int) -> Array:
    """Repeats each kv head for the query heads of its group: query head h uses kv head h // (H /
    Hkv).
    """
    return np.repeat(x, heads // x.shape[1], axis=1) if x.shape[1] != heads else x


def _collect(x: Array, kv_heads: int) -> Array:
    """Sums over each group: the transpose of _expand."""
    batch, heads, rows, dim = x.shape
    return x.reshape(batch, kv_heads, heads // max(kv_heads, 1), rows, dim).sum(axis=2)


def _per_head(x: ArrayLike, batch: int, heads: int) -> Array:
    """(H,) or (B, H) -> (B, H, 1, 1)."""
    return np.broadcast_to(np.asarray(x, np.float64), (batch, heads))[:, :, None, None]


def attention(query: ArrayLike, key: ArrayLike, value: ArrayLike, **opts: Any) -> Result:
    """softmax(modified scale * Q K^T) V with every option; shapes as the module says."""
    options = Options(**opts)
    q, k, v = _heads_first(query), _heads_first(key), _heads_first(value)
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[2]
    k, v = _expand(k, heads), _expand(v, heads)
    scale = head_dim**-0.5 if options.scale is None else float(options.scale)
    full = (batch, heads, seqlen_q, seqlen_k)

    with np.errstate(all="ignore"):
        s = scale * (q @ k.swapaxes(-1, -2))
        capped = np.ones_like(s)
        if options.softcap:
            t = np.tanh(s / options.softcap)
            s, capped = options.softcap * t, 1.0 - t * t
        rows, keys, _ = positions(batch, seqlen_q, seqlen_k, options)
        distance = np.abs(rows[:, None, :, None] - keys[None, None, None, :]).astype(np.float64)
        if options.alibi_slopes is not None:
            s = s - _per_head(options.alibi_slopes, batch, heads) * distance
        visible = np.broadcast_to(visibility(batch, seqlen_q, seqlen_k, options), full).copy()
        if options.mask is not None:
            mask = np.asarray(options.mask)
            if mask.dtype == np.bool_:
                visible &= mask
            else:
                mask = mask.astype(np.float64)
                visible &= ~np.isneginf(mask)
                s = s + mask
        s = np.where(visible, s, -np.inf)

        sinks = np.full((batch, heads, 1, 1), -np.inf)
        if options.sinks is not None:
            sinks = _per_head(options.sinks, batch, heads)
        row_max = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), sinks)
        shift = np.where(np.isneginf(row_max), 0.0, row_max)
        weights = np.exp(s - shift)
        row_sum = weights.sum(axis=-1, keepdims=True) + np.exp(sinks - shift)
        visible &= row_sum != 0.0  # scores that are all -inf give no weights: a dead row
        lse = (shift + np.log(row_sum))[..., 0]
        p = np.where(visible, weights / row_sum, 0.0)
        sink_p = np.where(np.isneginf(sinks[..., 0]), 0.0, np.exp(sinks[..., 0] - lse))
        keep = np.ones(full)
        if options.dropout_p != 0.0:
            keep = dropout_mask(
                full,
                options.dropout_p,
                options.dropout_seed,
                options.dropout_offset,
                options.dropout_shard,
            )
        out = select_matmul(p * keep, v, visible)
    return Result(out.transpose(0, 2, 1, 3), lse, p, visible, keep, capped, distance, sink_p, scale)


def _sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """Sums a full array over the axes along which `shape` is broadcast to it."""
    padded = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(a for a in range(x.ndim) if padded[a] == 1 and x.shape[a] != 1)
    return x.sum(axis=axes, keepdims=True).reshape(shape)


def attention_backward(
    dout: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    dlse: ArrayLike | None = None,
    **opts: Any,
) -> Gradients:
    """Gradients of sum(dout * out) + sum(dlse * lse) in closed form; see docs/math.md for the
    derivation.
    """
    options = Options(**opts)
    fwd = attention(query, key, value, **opts)
    q, k, v, do = (_heads_first(x) for x in (query, key, value, dout))
    _batch, heads = q.shape[:2]
    kv_heads = k.shape[1]
    k, v = _expand(k, heads), _expand(v, heads)
    visible, p = fwd.visible, fwd.probabilities
    dl = np.zeros_like(fwd.lse) if dlse is None else np.asarray(dlse, np.float64)

    with np.errstate(all="ignore"):
        dv = select_matmul((p * fwd.keep).swapaxes(-1, -2), do, visible.swapaxes(-1, -2))
        dp = np.where(visible, (do @ v.swapaxes(-1, -2)) * fwd.keep, 0.0)
        delta = np.where(visible, p * dp, 0.0).sum(axis=-1)
        ds = np.where(visible, p * (dp - (delta - dl)[..., None]), 0.0)
        ds_score = np.where(visible, ds * fwd.capped, 0.0)
        dq = fwd.scale * select_matmul(ds_score, k, visible)
        dk = fwd.scale * select_matmul(ds_score.swapaxes(-1, -2), q, visible.swapaxes(-1, -2))
        grads = Gradients(
            dq.transpose(0, 2, 1, 3),
            _collect(dk, kv_heads).transpose(0, 2, 1, 3),
            _collect(dv, kv_heads).transpose(0, 2, 1, 3),
        )
        if options.mask is not None and np.asarray(options.mask).dtype != np.bool_:
            grads.dmask = _sum_to_shape(ds, np.shape(options.mask))
        if options.alibi_slopes is not None:
            per_head = -(ds * fwd.distance).sum(axis=(-1, -2))
            grads.dalibi_slopes = _sum_to_shape(per_head, np.shape(options.alibi_slopes))
        if options.sinks is not None:
            grads.dsinks = (fwd.sink_probability * (dl - delta)).sum(axis=(0, 2))
    return grads
