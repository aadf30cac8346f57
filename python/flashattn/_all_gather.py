"""Context parallelism with all keys on every rank: one exchange, then one call per query piece.

Memory per rank is that of all keys and values, but not of the scores. The backward pass gathers
again and sends each rank the gradients of its keys, which it sums in the order of the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from flashattn._api import attention_backward, attention_forward
from flashattn._parallel_call import Message
from flashattn._torch import TorchFramework

if TYPE_CHECKING:
    from flashattn._parallel_call import ParallelCall


def forward(
    call: ParallelCall, query: Any, key: Any, value: Any, slopes: Any, sinks: Any
) -> tuple[Any, Any]:
    """This rank's out and lse."""
    keys, values = in_order(call, key), in_order(call, value)
    out, lse = TorchFramework().forward_outputs(query, value, heads_first=False)
    for q in call.queries[call.rank]:
        if q.start < q.stop:
            options = _options(call, q, slopes, sinks)
            found = attention_forward(query[:, q.rows], keys, values, **options)
            out[:, q.rows], lse[:, :, q.rows] = found
    return out, lse


def backward(
    call: ParallelCall,
    results: tuple[Any, Any, Any, Any],
    query: Any,
    key: Any,
    value: Any,
    slopes: Any,
    sinks: Any,
) -> list[Any]:
    """Gradients of query, key, value, slopes and sinks from (dout, dlse, out, lse)."""
    keys, values = in_order(call, key), in_order(call, value)
    dout, dlse, out, lse = results
    dq = torch.empty_like(query, memory_format=torch.contiguous_format)
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (keys, values)]
    small: list[Any] = [None if x is None else torch.zeros_like(x) for x in (slopes, sinks)]
    for q in call.queries[call.rank]:
        if q.start == q.stop:
            continue
        found = attention_backward(
            dout[:, q.rows],
            query[:, q.rows],
            keys,
            values,
            out[:, q.rows],
            lse[:, :, q.rows],
            dlse[:, :, q.rows],
            **_options(call, q, slopes, sinks),
        )
        dq[:, q.rows] = found.dq
        sums[0] += found.dk
        sums[1] += found.dv
        for total, one in zip(small, (found.dalibi_slopes, found.dsinks), strict=True):
            if one is not None:
                total += one
    dk, dv = (_to_owners(call, x) for x in sums)
    return [dq, dk.to(key.dtype), dv.to(value.dtype), *small]


def in_order(call: ParallelCall, local: torch.Tensor) -> torch.Tensor:
    """All ranks' rows of axis 1, in the order of the sequence."""
    rows = [call.keys_of(rank) for rank in range(call.ranks)]
    # all_gather takes equal shapes only.
    padded = local.new_zeros(local.shape[0], max(rows), *local.shape[2:])
    padded[:, : local.shape[1]] = local
    found = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(found, padded, group=call.group)
    parts = [
        (piece.start, shard[:, piece.rows])
        for shard, held in zip(found, call.keys, strict=True)
        for piece in held
    ]
    return torch.cat([part for _, part in sorted(parts, key=lambda item: item[0])], 1)


def _to_owners(call: ParallelCall, whole: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks of this rank's rows of `whole`."""
    shards = [
        torch.cat([whole[:, piece.start : piece.stop] for piece in held], 1) for held in call.keys
    ]
    mine = shards[call.rank]
    places = {n: torch.empty_like(mine) for n in range(call.ranks) if n != call.rank}
    call.exchange([Message(shards[n], n, place, n) for n, place in places.items()]).wait()
    places[call.rank] = mine
    total = torch.zeros_like(mine)
    for n in range(call.ranks):
        total += places[n]
    return total


def _options(call: ParallelCall, q: Any, slopes: Any, sinks: Any) -> dict[str, Any]:
    given = {"alibi_slopes": slopes, "sinks": sinks}
    terms = {name: x for name, x in given.items() if x is not None}
    return {**call.pair_options(q, call.whole_keys()), **terms}
