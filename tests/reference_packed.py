"""The float64 oracle for packed sequences, KV caches, merging and ALiBi slopes: loops over
tests/reference.py.

Same conventions and promises as there; a separate file because it is a separate idea: what
surrounds one attention call, not the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import reference
from numpy.typing import ArrayLike, NDArray
from reference import Array, DropoutShard


def sequence_options(
    opts: dict[str, Any], b: int, heads: int, longest: tuple[int, int]
) -> dict[str, Any]:
    """The options of sequence b of a packed batch, as a batch of one. `longest`: queries, keys."""
    if opts.get("mask") is not None:
        raise NotImplementedError("mask has no meaning for packed sequences")
    picked = dict(opts)
    slopes = picked.get("alibi_slopes")
    if slopes is not None and np.ndim(slopes) == 2:
        picked["alibi_slopes"] = np.asarray(slopes)[b]
    for name in ("q_offset", "kv_lengths"):
        if picked.get(name) is not None and np.ndim(picked[name]) == 1:
            picked[name] = np.asarray(picked[name])[b : b + 1]
    if picked.get("dropout_p"):
        # Batch entry b of the padded batch, as heads of a batch of one with all entries' heads.
        whole = DropoutShard(heads, 0, longest[0], 0, longest[1], 0)
        shard = picked.get("dropout_shard") or whole
        start = b * shard.global_heads + shard.head_start
        picked["dropout_shard"] = DropoutShard((b + 1) * shard.global_heads, start, *shard[2:])
    return picked


def longest_sequences(cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int]) -> tuple[int, int]:
    return tuple(int(np.diff(cu).max(initial=0)) for cu in (cu_seqlens_q, cu_seqlens_k))  # type: ignore[return-value]


def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    **opts: Any,
) -> tuple[Array, Array]:
    """Packed sequences, one after the other: out (total_q, H, Dv), lse (H, total_q)."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    lse = np.full((q.shape[1], q.shape[0]), -np.inf)
    longest = longest_sequences(cu_seqlens_q, cu_seqlens_k)
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        keys = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        part = reference.attention(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            **sequence_options(opts, b, q.shape[1], longest),
        )
        out[rows], lse[:, rows] = part.out[0], part.lse[0]
    return out, lse


def attention_varlen_backward(
    dout: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    dlse: ArrayLike | None = None,
    **opts: Any,
) -> reference.Gradients:
    """Gradients of attention_varlen; rows and keys outside every sequence get 0."""
    do, q, k, v = (np.asarray(x, np.float64) for x in (dout, query, key, value))
    grads = reference.Gradients(np.zeros_like(q), np.zeros_like(k), np.zeros_like(v))
    if opts.get("alibi_slopes") is not None:
        grads.dalibi_slopes = np.zeros(np.shape(opts["alibi_slopes"]))
    if opts.get("sinks") is not None:
        grads.dsinks = np.zeros(np.shape(opts["sinks"]))
    longest = longest_sequences(cu_seqlens_q, cu_seqlens_k)
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        keys = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        dl = None if dlse is None else np.asarray(dlse)[None, :, rows]
        part = reference.attention_backward(
            do[None, rows],
            q[None, rows],
            k[None, keys],
            v[None, keys],
            dl,
            **sequence_options(opts, b, q.shape[1], longest),
        )
        if grads.dsinks is not None:
            grads.dsinks += part.dsinks
        if grads.dalibi_slopes is not None:
            own = grads.dalibi_slopes if grads.dalibi_slopes.ndim == 1 else grads.dalibi_slopes[b]
            own += part.dalibi_slopes
        grads.dq[rows], grads.dk[keys], grads.dv[keys] = part.dq[0], part.dk[0], part.dv[0]
    return grads


def rotate(
    rows: ArrayLike, positions: Array, cos: ArrayLike, sin: ArrayLike, interleaved: bool
) -> NDArray[Any]:
    """Rotary position embedding of (T, heads, dim) at positions (T,): Su et al., "RoFormer".

    In the dtype of rows, rounded through float32.
    """
    out = np.array(rows, np.float64)
    pairs = np.shape(cos)[1]
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if interleaved
        else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    c, s = (np.asarray(x, np.float64)[positions][:, None, :] for x in (cos, sin))
    x, y = out[..., first].copy(), out[..., second].copy()
    out[..., first], out[..., second] = x * c - y * s, x * s + y * c
    return out.astype(np.float32).astype(np.asarray(rows).dtype)


def attention_kvcache(
    query: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    *,
    cache_seqlens: Sequence[int],
    k: ArrayLike | None = None,
    v: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    cache_batch_idx: Sequence[int] | None = None,
    leftpad: Sequence[int] | None = None,
    rotary_cos: ArrayLike | None = None,
    rotary_sin: ArrayLike | None = None,
    rotary_interleaved: bool = True,
    **opts: Any,
) -> tuple[reference.Result, Array, Array]:
    """Appends k, v behind each length, then attends; returns the result and the new caches.

    Caches are (B, S, Hkv, D), or pages (num_pages, page_size, Hkv, D) reached through
    block_table (B, max_pages). What is stored or rotated is rounded to the caches' dtype.
    """
    keys, values = np.array(k_cache, np.float64), np.array(v_cache, np.float64)
    lengths = [int(n) for n in cache_seqlens]
    batch = len(lengths)
    starts = [0] * batch if leftpad is None else [int(n) for n in leftpad]
    places = range(batch) if cache_batch_idx is None else [int(n) for n in cache_batch_idx]

    def slot(b: int, row: int) -> tuple[int, int]:
        if block_table is None:
            return places[b], row
        page_size = keys.shape[1]
        return int(np.asarray(block_table)[b, row // page_size]), row % page_size

    def turned(rows: ArrayLike, b: int, advances: bool) -> Array:
        if rotary_cos is None or rotary_sin is None:
            return np.asarray(rows, np.float64)
        at = lengths[b] - starts[b] + np.arange(np.shape(rows)[0]) * advances
        return rotate(rows, at, rotary_cos, rotary_sin, rotary_interleaved).astype(np.float64)

    if k is not None and v is not None:
        advances = bool(opts.get("causal")) or tuple(opts.get("window") or (-1, -1)) != (-1, -1)
        query = np.stack([turned(np.asarray(query)[b], b, advances) for b in range(batch)])
        for b in range(batch):
            new = turned(np.asarray(k)[b], b, True)
            for t in range(np.shape(k)[1]):
                at = slot(b, lengths[b] + t)
                keys[at], values[at] = new[t], np.asarray(v)[b, t]
        lengths = [n + np.shape(k)[1] for n in lengths]
    used = [n - start for n, start in zip(lengths, starts, strict=True)]
    flat_k = np.zeros((batch, max(used, default=0), *keys.shape[2:]))
    flat_v = np.zeros((batch, max(used, default=0), *values.shape[2:]))
    for b in range(batch):
        for t in range(used[b]):
            at = slot(b, starts[b] + t)
            flat_k[b, t], flat_v[b, t] = keys[at], values[at]
    return reference.attention(query, flat_k, flat_v, kv_lengths=used, **opts), keys, values


def merge_attention(outs: Sequence[ArrayLike], lses: Sequence[ArrayLike]) -> tuple[Array, Array]:
    """Exact merge of partial results over disjoint keys: outs (B, Tq, H, Dv), lses (B, H, Tq)."""
    parts = np.stack([np.asarray(x, np.float64) for x in lses])
    top = parts.max(axis=0)
    shift = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = shift + np.log(np.exp(parts - shift).sum(axis=0))
    weights = np.exp(parts - np.where(np.isneginf(lse), 0.0, lse))
    out = np.zeros(np.shape(outs[0]))
    for w, x in zip(weights, outs, strict=True):
        weight = w.swapaxes(1, 2)[..., None]
        # An empty part may hold anything.
        out += np.where(weight == 0, 0.0, weight * np.asarray(x, np.float64))
    return np.asarray(out), lse


def alibi_slopes(num_heads: int) -> Array:
    """Press et al., "Train short, test long" (ICLR 2022), with their rule for counts that are no
    power of two.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-4.0 * (h + 1) / power) for h in range(0, 2 * power, 2)]
    return np.array(slopes[:num_heads])
