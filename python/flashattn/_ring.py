"""Ring attention: keys and values pass from rank to rank, each computes with those it has.

While a rank computes with one shard the next one is on its way. The backward pass sends the
gradients of keys and values behind them, summed in float32, so that they come home after one turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashattn._api import attention_backward, attention_forward
from flashattn._merge import merge_attention
from flashattn._shards import pairs
from flashattn._torch import TorchFramework

if TYPE_CHECKING:
    from flashattn._parallel_call import ParallelCall


def forward(
    call: ParallelCall, query: Any, key: Any, value: Any, slopes: Any, sinks: Any
) -> tuple[Any, Any]:
    """This rank's out and lse: parts over each piece of the keys, merged in float32."""
    mine = call.queries[call.rank]
    parts: list[Any] = [None] * len(mine)
    block = [key.contiguous(), value.contiguous()]
    for step in range(call.ranks):
        coming = _next_block(call, step, block)
        for n, q, k in pairs(mine, call.keys[call.owner(step)]):
            terms = _terms(slopes, sinks if parts[n] is None else None)
            # The first part of a piece is where its sinks are, whatever it sees.
            if q.start == q.stop or (parts[n] is not None and not call.rules.sees(q, k)):
                continue
            out, lse = attention_forward(
                query[:, q.rows],
                block[0][:, k.rows],
                block[1][:, k.rows],
                **call.pair_options(q, k),
                **terms,
            )
            part = (out.float(), lse)
            one = parts[n]
            parts[n] = part if one is None else merge_attention(*zip(one, part, strict=True))
        block = coming.wait() if coming is not None else block
    out, lse = TorchFramework().forward_outputs(query, value, heads_first=False)
    for q, part in zip(mine, parts, strict=True):
        if part is not None:
            out[:, q.rows], lse[:, :, q.rows] = part
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
    mine = call.queries[call.rank]
    block = [key.contiguous(), value.contiguous()]
    dq = torch.zeros_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
    small: list[Any] = [None if x is None else torch.zeros_like(x) for x in (slopes, sinks)]
    started = [False] * len(mine)
    returning = None
    for step in range(call.ranks):
        coming = _next_block(call, step, block)
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in block]
        for n, q, k in pairs(mine, call.keys[call.owner(step)]):
            terms = _terms(slopes, None if started[n] else sinks)
            if q.start == q.stop or (started[n] and not call.rules.sees(q, k)):
                continue
            started[n] = True
            found = _pair_gradients(call, results, (query, *block), (q, k), terms)
            dq[:, q.rows] += found.dq
            sums[0][:, k.rows] += found.dk
            sums[1][:, k.rows] += found.dv
            for total, one in zip(small, (found.dalibi_slopes, found.dsinks), strict=True):
                if one is not None:
                    total += one
        if returning is not None:
            for total, before in zip(sums, returning.wait(), strict=True):
                total += before
        # What goes on is this shard's; what comes is the sum for the shard of the next step.
        returning = call.pass_on(sums, call.keys_of(call.owner(step + 1)), 2)
        block = coming.wait() if coming is not None else block
    assert returning is not None  # there is at least one step
    dk, dv = returning.wait()
    return [dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), *small]


def _next_block(call: ParallelCall, step: int, block: list[Any]) -> Any:
    if step + 1 == call.ranks:
        return None
    return call.pass_on(block, call.keys_of(call.owner(step + 1)), 0)


def _pair_gradients(
    call: ParallelCall, results: Any, tensors: Any, pair: Any, terms: dict[str, Any]
) -> Any:
    """The whole's lse makes the pair's probabilities the whole's."""
    (dout, dlse, out, lse), (query, key, value), (q, k) = results, tensors, pair
    return attention_backward(
        dout[:, q.rows],
        query[:, q.rows],
        key[:, k.rows],
        value[:, k.rows],
        out[:, q.rows],
        lse[:, :, q.rows],
        dlse[:, :, q.rows],
        **call.pair_options(q, k),
        **terms,
    )


def _terms(slopes: Any, sinks: Any) -> dict[str, Any]:
    given = {"alibi_slopes": slopes, "sinks": sinks}
    return {name: x for name, x in given.items() if x is not None}
