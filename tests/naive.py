"""The yardstick of the tolerance rule: plain attention in the call's own dtype, rounded after every
tensor op.

It does what a framework's unfused path does: each matrix product accumulates in float32 and is
rounded once to the dtype, softmax is taken in float32 and rounded, and the backward pass is the
chain rule through those ops. Its distance from the oracle says what a dtype costs without any
cleverness. Inputs must be finite at visible places; positions excluded by the oracle's visibility
are selected away. Relies on numpy, tests/reference.py for visibility.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import reference
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float32]


def rounder(dtype: np.dtype) -> Callable[[ArrayLike], Array]:
    """Rounds to `dtype` and hands the value back as float32, in which the next op computes."""
    return lambda x: np.asarray(x).astype(np.float32).astype(dtype).astype(np.float32)


class Naive:
    """One problem in one dtype. forward() and backward() return float32 arrays holding values of
    the dtype.
    """

    def __init__(self, query: ArrayLike, key: ArrayLike, value: ArrayLike, **opts: Any) -> None:
        self.options = reference.Options(**opts)
        self.round = rounder(np.asarray(query).dtype)
        q, k, v = (
            np.asarray(x).astype(np.float32).transpose(0, 2, 1, 3) for x in (query, key, value)
        )
        self.kv_heads = k.shape[1]
        group = q.shape[1] // max(self.kv_heads, 1)
        self.q, self.k, self.v = q, np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scale = q.shape[-1] ** -0.5 if self.options.scale is None else self.options.scale
        self.scale = np.float32(scale)
        self._scores()

    def _scores(self) -> None:
        options, rnd = self.options, self.round
        batch, heads, seqlen_q, _ = self.q.shape
        seqlen_k = self.k.shape[2]
        s = rnd(rnd(self.q * self.scale) @ self.k.swapaxes(-1, -2))
        self.capped = np.ones_like(s)
        if options.softcap:
            cap = np.float32(options.softcap)
            t = rnd(np.tanh(rnd(s / cap)))
            s, self.capped = rnd(t * cap), rnd(1 - rnd(t * t))
        rows, keys, _ = reference.positions(batch, seqlen_q, seqlen_k, options)
        self.distance = np.abs(rows[:, None, :, None] - keys).astype(np.float32)
        if options.alibi_slopes is not None:
            slopes = np.broadcast_to(np.asarray(options.alibi_slopes, np.float32), (batch, heads))
            s = rnd(s - rnd(slopes[:, :, None, None] * self.distance))
        visible = reference.visibility(batch, seqlen_q, seqlen_k, options)
        if options.mask is not None:
            mask = np.asarray(options.mask)
            if mask.dtype == np.bool_:
                visible = visible & mask
            else:
                visible = visible & ~np.isneginf(mask.astype(np.float64))
                s = rnd(
                    s + np.where(np.isneginf(mask.astype(np.float64)), 0, mask).astype(np.float32)
                )
        self.visible = np.broadcast_to(visible, s.shape)
        self.s = np.where(self.visible, s, np.float32(-np.inf))
        self.sinks = None
        if options.sinks is not None:
            self.sinks = np.broadcast_to(np.asarray(options.sinks, np.float32), (batch, heads))[
                :, :, None, None
            ]
        self.keep = np.ones_like(self.s)
        if options.dropout_p:
            self.keep = reference.dropout_mask(
                self.s.shape,
                options.dropout_p,
                options.dropout_seed,
                options.dropout_offset,
                options.dropout_shard,
            ).astype(np.float32)

    def forward(self) -> tuple[Array, Array]:
        """out (B, Tq, H, Dv) in the dtype's values, lse (B, H, Tq) float32."""
        with np.errstate(all="ignore"):
            top = self.s.max(axis=-1, keepdims=True, initial=-np.inf)
            if self.sinks is not None:
                top = np.maximum(top, self.sinks)
            shift = np.where(np.isneginf(top), np.float32(0), top)
            weights = np.exp(self.s - shift)
            total = weights.sum(axis=-1, keepdims=True, dtype=np.float32)
            if self.sinks is not None:
                total = total + np.exp(self.sinks - shift)
            self.p = self.round(np.where(self.visible, weights / total, np.float32(0)))
            self.sink_p = (
                None if self.sinks is None else (np.exp(self.sinks - shift) / total)[..., 0]
            )
            self.lse = (shift + np.log(total))[..., 0]
            out = self.round(self.round(self.p * self.keep) @ self.v)
        return out.transpose(0, 2, 1, 3), self.lse

    def backward(self, dout: ArrayLike, dlse: ArrayLike | None = None) -> reference.Gradients:
        """Gradients by the chain rule through the ops above: softmax's from its own output."""
        rnd = self.round
        self.forward()
        do, dl = self._incoming(dout, dlse)
        dp = rnd(rnd(do @ self.v.swapaxes(-1, -2)) * self.keep)
        delta = (self.p * dp).sum(axis=-1, dtype=np.float32) - dl
        return self._gradients(self.p, dp, delta, do)

    def backward_from_stored(
        self, out: ArrayLike, lse: ArrayLike, dout: ArrayLike, dlse: ArrayLike | None = None
    ) -> reference.Gradients:
        """Gradients from a forward's exact results, rounded by storing to the dtype and float32.

        P = exp(S - lse), delta = rowsum(dout * out) - dlse: an error of lse is its whole row's.
        """
        rnd = self.round
        self.forward()
        o, stored = rnd(out), np.asarray(lse, np.float32)
        do, dl = self._incoming(dout, dlse)
        with np.errstate(invalid="ignore"):
            p = rnd(np.where(self.visible, np.exp(self.s - stored[..., None]), np.float32(0)))
        dp = rnd(rnd(do @ self.v.swapaxes(-1, -2)) * self.keep)
        delta = (do * o.transpose(0, 2, 1, 3)).sum(axis=-1, dtype=np.float32) - dl
        return self._gradients(p, dp, delta, do)

    def _incoming(self, dout: ArrayLike, dlse: ArrayLike | None) -> tuple[Array, Array]:
        do = np.asarray(dout).astype(np.float32).transpose(0, 2, 1, 3)
        return do, np.zeros_like(self.lse) if dlse is None else np.asarray(dlse, np.float32)

    def _gradients(self, p: Array, dp: Array, delta: Array, do: Array) -> reference.Gradients:
        """Everything behind P, dP and delta."""
        rnd = self.round
        dv = rnd(rnd(p * self.keep).swapaxes(-1, -2) @ do)
        ds = np.where(self.visible, rnd(p * (dp - delta[..., None])), np.float32(0))
        ds_score = rnd(ds * self.capped)
        dq = rnd(rnd(ds_score @ self.k) * self.scale)
        dk = rnd(ds_score.swapaxes(-1, -2) @ rnd(self.q * self.scale))
        grads = reference.Gradients(
            dq.transpose(0, 2, 1, 3),
            self._collect(dk).transpose(0, 2, 1, 3),
            self._collect(dv).transpose(0, 2, 1, 3),
        )
        options = self.options
        if options.mask is not None and np.asarray(options.mask).dtype != np.bool_:
            grads.dmask = _sum_to_shape(ds, np.shape(options.mask))
        if options.alibi_slopes is not None:
            per_head = -(ds * self.distance).sum(axis=(-1, -2), dtype=np.float32)
            grads.dalibi_slopes = _sum_to_shape(per_head, np.shape(options.alibi_slopes))
        if self.sink_p is not None:
            grads.dsinks = -(self.sink_p * delta).sum(axis=(0, 2), dtype=np.float32)
        return grads

    def _collect(self, x: Array) -> Array:
        batch, heads, rows, dim = x.shape
        return self.round(
            x.reshape(batch, self.kv_heads, heads // max(self.kv_heads, 1), rows, dim).sum(axis=2)
        )


def _sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    padded = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(a for a in range(x.ndim) if padded[a] == 1 and x.shape[a] != 1)
    return x.sum(axis=axes, keepdims=True, dtype=np.float32).reshape(shape)
