"""Attention weights, one by one: flash_attn's S_dmask. Takes the O(T^2) memory that it is."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from flashattn import _core
from flashattn._api import attention_forward
from flashattn._dropout import dropout_mask
from flashattn._varlen import attention_varlen

if TYPE_CHECKING:
    from collections.abc import Mapping

_COLUMNS = 256  # the largest value_dim that every backend takes


def signed_probabilities(
    q: Any,
    k: Any,
    options: Mapping[str, Any],
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
) -> Any:
    """The softmax that dropout was applied to, negative where a weight was dropped.

    Weights are what attention gives for values that are columns of the identity.

    Args:
        q: (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with cu_seqlens.
        k: like q.
        options: those of the call, dropout_seed among them.
        cu_seqlens_q: int32 (batch + 1,), or None.
        cu_seqlens_k: likewise.

    Returns:
        (batch, heads, seqlen_q, seqlen_k) in q's dtype and framework, the longest lengths with
        cu_seqlens; without dropout an array of no elements, as flash_attn has it.

    Raises:
        ValueError: keys that lie in pages, which have no place among a sequence's keys.
    """
    if not options.get("dropout_p"):
        return _empty(q, (0,))
    if "block_table" in options:
        raise ValueError("return_attn_probs (True) must be False with block_table and dropout")
    plain = {name: x for name, x in options.items() if not name.startswith("dropout")}
    if cu_seqlens_q is None:
        whole = _dense(q, k, plain)
    else:
        starts = [[int(n) for n in cu] for cu in (cu_seqlens_q, cu_seqlens_k)]
        whole = _packed(q, k, starts[0], starts[1], plain)
    dropped = dropout_mask(whole.shape, options["dropout_p"], options["dropout_seed"]) == 0
    if isinstance(whole, np.ndarray):
        return np.where(dropped, -whole, whole)
    return whole.where(whole.new_tensor(~dropped, dtype=bool), -whole)


def _dense(q: Any, k: Any, options: Mapping[str, Any]) -> Any:
    batch, rows, heads, _ = q.shape
    keys = k.shape[1]
    weights = _empty(q, (batch, heads, rows, keys))
    for start in range(0, keys, _COLUMNS):
        columns = range(start, min(start + _COLUMNS, keys))
        one_hot = _one_hot(q, np.arange(keys), columns, k.shape[2])
        values = (
            np.broadcast_to(one_hot, (batch, *one_hot.shape))
            if isinstance(q, np.ndarray)
            else one_hot.expand(batch, *one_hot.shape)
        )
        out, _ = attention_forward(q, k, values, **options)
        _core.settle()
        weights[..., columns.start : columns.stop] = out.swapaxes(1, 2)
    return weights


def _packed(
    q: Any, k: Any, starts_q: list[int], starts_k: list[int], options: Mapping[str, Any]
) -> Any:
    lengths = [[b - a for a, b in pairwise(s)] for s in (starts_q, starts_k)]
    rows, keys = (max(each, default=0) for each in lengths)
    weights = _empty(q, (len(lengths[0]), q.shape[1], rows, keys))
    weights[...] = 0
    place = np.full(k.shape[0], -1)
    for start, length in zip(starts_k, lengths[1], strict=False):
        place[start : start + length] = np.arange(length)
    for start in range(0, keys, _COLUMNS):
        columns = range(start, min(start + _COLUMNS, keys))
        values = _one_hot(q, place, columns, k.shape[1])
        out, _ = attention_varlen(q, k, values, starts_q, starts_k, **options)
        _core.settle()
        for b, (first, length) in enumerate(zip(starts_q, lengths[0], strict=False)):
            part = out[first : first + length].swapaxes(0, 1)
            weights[b, :, :length, columns.start : columns.stop] = part
    return weights


def _one_hot(q: Any, place: Any, columns: range, heads: int) -> Any:
    """(keys, heads, columns): 1 where a key's place is the column's."""
    values = (place[:, None] == np.array(columns)).astype(np.float32)
    wide = np.ascontiguousarray(np.repeat(values[:, None], heads, axis=1))
    if isinstance(q, np.ndarray):
        return wide.astype(q.dtype)
    import torch

    return torch.from_numpy(wide).to(q.dtype)


def _empty(q: Any, shape: tuple[int, ...]) -> Any:
    return np.empty(shape, q.dtype) if isinstance(q, np.ndarray) else q.new_empty(shape)
