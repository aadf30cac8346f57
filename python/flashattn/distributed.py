"""Context parallelism over torch.distributed: one sequence, shared among the ranks of a group.

Every rank holds a shard of the queries, keys and values of all heads and gets its shard of the
result; no rank ever holds the whole of the scores. The numbers are those of one process up to the
order of float32 sums, and dropout drops the same weights bit for bit. Relies on
`attention_forward`, `attention_backward` and `merge_attention`; `_shards` says who holds what.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from flashattn import _all_gather, _ring
from flashattn._options import DEFAULTS
from flashattn._parallel_call import ParallelCall
from flashattn._shards import Piece, Sharding, lengths, pieces

__all__ = ["context_parallel_attention", "shard", "unshard"]

_FUNCTION = "context_parallel_attention"
_METHODS = {"ring": _ring, "all_gather": _all_gather}
_REFUSED = {
    "mask": "a mask of the whole is no rank's to hold",
    "dropout_shard": "the shards are numbered here",
}


def context_parallel_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    sharding: Sharding = "contiguous",
    method: Literal["ring", "all_gather"] = "ring",
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """`attention` of a sequence that is shared among the ranks of a group.

    Every rank calls it with the same options; options are the whole problem's: causal, windows,
    kv_lengths and offsets are positions in the whole sequence. Differentiable, once, and then every
    rank has to go backward. A rank's gradients of alibi_slopes and sinks are its share of them: sum
    them over the group, as for any parameter that all ranks hold.

    ring (Liu, Zaharia, Abbeel: "Ring Attention with Blockwise Transformers", 2023): keys and values
    go round while each rank computes with those it has; a rank holds two shards of them.
    all_gather: each rank holds all keys and values, in one exchange and one call per piece.

    Args:
        query: this rank's shard, (batch, local seqlen_q, query_heads, head_dim), or as `layout`
            says. Shards may have different lengths, 0 included.
        key: this rank's shard, (batch, local seqlen_k, kv_heads, head_dim).
        value: this rank's shard.
        group: the ranks; default the default group.
        sharding: "contiguous", or "zigzag", which gives every rank the same work under a causal
            mask. `shard` cuts a sequence accordingly.
        method: "ring" or "all_gather".
        return_lse: also return this rank's shard of lse.
        **options: those of `attention` but mask, dropout_shard and out. A dropout seed that is not
            given is drawn by the group's first rank.

    Returns:
        This rank's shard of out, or (out, lse).

    Raises:
        ValueError: an option that is refused, an unknown sharding or method, and as `attention`.
        TypeError: an unknown option, and as `attention`.
        NotImplementedError: and RuntimeError, as `attention` does.
    """
    for name in options:
        if name not in DEFAULTS:
            raise TypeError(f"{_FUNCTION}: unknown option {name!r}")
    for name, reason in _REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(f"{_FUNCTION}: {name} (given) must be None: {reason}")
    if method not in _METHODS:
        raise ValueError(f'{_FUNCTION}: method ({method!r}) must be "ring" or "all_gather"')
    _check_sharding(_FUNCTION, sharding)
    options = dict(options)
    swap = options.pop("layout", "bshd") == "bhsd"
    if swap:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    slopes, sinks = options.pop("alibi_slopes", None), options.pop("sinks", None)
    call = ParallelCall.of(query, key, group, sharding, options)
    record: Any = _Attention.apply
    out, lse = record(_METHODS[method], call, query, key, value, slopes, sinks)
    out = out.transpose(1, 2) if swap else out
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    """One node of the graph on every rank."""

    @staticmethod
    def forward(
        ctx: Any, method: Any, call: ParallelCall, query: Any, key: Any, value: Any, *terms: Any
    ) -> tuple[Any, Any]:
        out, lse = method.forward(call, query, key, value, *terms)
        ctx.save_for_backward(out, lse, query, key, value, *terms)
        ctx.method, ctx.call = method, call
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        out, lse, *inputs = ctx.saved_tensors
        return (None, None, *ctx.method.backward(ctx.call, (dout, dlse, out, lse), *inputs))


def shard(
    tensor: torch.Tensor,
    dim: int = 1,
    *,
    group: dist.ProcessGroup | None = None,
    sharding: Sharding = "contiguous",
) -> torch.Tensor:
    """This rank's shard of a tensor that every rank holds. Differentiable.

    Args:
        tensor: of any shape.
        dim: the axis of the sequence.
        group: the ranks; default the default group.
        sharding: "contiguous" or "zigzag".

    Returns:
        The rows of `tensor` that are this rank's, in the order that the attention expects.

    Raises:
        ValueError: an unknown sharding.
    """
    _check_sharding("shard", sharding)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    shards = lengths(tensor.shape[dim], ranks, sharding)
    parts = [_narrow(tensor, dim, piece) for piece in pieces(shards, sharding)[rank]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def unshard(
    tensor: torch.Tensor,
    dim: int = 1,
    *,
    group: dist.ProcessGroup | None = None,
    sharding: Sharding = "contiguous",
) -> torch.Tensor:
    """The whole tensor, on every rank, from the shards. Not differentiable.

    Args:
        tensor: this rank's shard, of at least two axes; the shards may have different lengths.
        dim: the axis of the sequence.
        group: the ranks; default the default group.
        sharding: "contiguous" or "zigzag".

    Returns:
        The rows in the order of the sequence.

    Raises:
        ValueError: an unknown sharding.
    """
    _check_sharding("unshard", sharding)
    local = tensor.detach().movedim(dim, 1)
    call = ParallelCall.of(local, local, group, sharding, {})
    return _all_gather.in_order(call, local).movedim(1, dim)


def _narrow(tensor: torch.Tensor, dim: int, piece: Piece) -> torch.Tensor:
    return tensor.narrow(dim, piece.start, piece.stop - piece.start)


def _check_sharding(function: str, sharding: Any) -> None:
    if sharding not in ("contiguous", "zigzag"):
        raise ValueError(f'{function}: sharding ({sharding!r}) must be "contiguous" or "zigzag"')
