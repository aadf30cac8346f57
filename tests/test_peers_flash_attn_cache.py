"""flash-attention's own test grid of KV caches, run against our flash_attn_with_kvcache.

As test_peers_flash_attn.py. What was appended must equal the oracle's cache bit for bit.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import flashattn as fa
import numpy as np
import peer_flash_attn as peer
import pytest
import reference_packed
import torch
from peer_flash_attn import FLAGS, KV_HEADS, options, randn
from peer_grid import case_id, sample, sizes
from tolerance import assert_close
from torch_numbers import numbers
from yardstick import forward_yardstick

BATCH, HEADS = 2, 6
AXES = {
    "dtype": (torch.float16,),
    "num_splits": (1, 0),
    "mha_type": tuple(KV_HEADS),
    "new_kv": FLAGS,
    "alibi": FLAGS,
    "local": FLAGS,
    "causal": FLAGS,
    "new_is_seqlen_q": (True, False),
    "rotary_interleaved": FLAGS,
    "rotary_fraction": (0.0, 0.5, 1.0),
    "page_size": (None, 256),
    "has_leftpad": FLAGS,
    "has_batch_idx": FLAGS,
    "d": (32, 59, 64, 80, 128, 256),
    "seqlens": sizes(
        [
            *[(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048)],
            *[(16, 20000), (1, 128 * 1024), (16, 128 * 1024), (128, 128)],
        ]
    ),
}


def is_upstreams(case: SimpleNamespace) -> bool:
    """What upstream's test leaves out: it does not fit, or its kernels lack it."""
    rows, keys = case.seqlens
    fits = rows <= keys if case.new_kv else case.rotary_fraction == 0
    return fits and not (case.page_size is not None and (case.has_batch_idx or case.has_leftpad))


CASES = sample(AXES, 24, is_upstreams)


def tables(case: SimpleNamespace, random: torch.Generator) -> dict[str, Any]:
    """Cosines and sines of the rotary embedding; its dimensions are a multiple of 16."""
    pairs = int(case.rotary_fraction * case.d) // 16 * 16 // 2
    if pairs == 0:
        return {}
    angle = 2 * math.pi * torch.rand(case.seqlens[1], pairs, generator=random)
    both = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    return {n: x.to(case.dtype) for n, x in both.items()} | {
        "rotary_interleaved": case.rotary_interleaved
    }


def call_of(case: SimpleNamespace) -> tuple[Any, Any, Any, dict[str, Any]]:
    """query, caches (in a row) and upstream's keywords but block_table."""
    random = peer.generator(case)
    rows, keys = case.seqlens
    kv_heads = HEADS // KV_HEADS[case.mha_type]

    def normal(*shape: int) -> Any:
        return randn(random, case.dtype, *shape, grad=False)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    query = normal(BATCH, rows, HEADS, case.d)
    entries = BATCH * 2 if case.has_batch_idx else BATCH
    caches = [normal(entries, keys, kv_heads, case.d) for _ in range(2)]
    call: dict[str, Any] = options(case, (BATCH, HEADS), keys, random)
    new = rows if case.new_is_seqlen_q else draw(1, rows + 1)
    room = keys + 1
    if case.new_kv:
        call |= {name: normal(BATCH, new, kv_heads, case.d) for name in ("k", "v")}
        call |= tables(case, random)
        # Rotary tables end where the cache does, and query rows need their positions too.
        turned = (case.causal or case.local) and "rotary_cos" in call
        room -= rows if turned else new
    used = [draw(0 if case.new_kv else 1, room) for _ in range(BATCH)]
    call["cache_seqlens"] = torch.tensor(used, dtype=torch.int32)
    if case.has_leftpad:
        pads = [draw(0, n) if n else 0 for n in used]
        call["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32)
    if case.has_batch_idx:
        call["cache_batch_idx"] = torch.randperm(entries, generator=random)[:BATCH].int()
    return query, *caches, call


def paged(caches: list[Any], size: int) -> tuple[list[Any], Any]:
    """The caches in pages of random numbers, three times as many as needed; and the table."""
    entries, rows = caches[0].shape[:2]
    each = -(-rows // size)
    random = torch.Generator().manual_seed(rows)
    table = torch.randperm(3 * entries * each, generator=random)[: entries * each]
    table = table.reshape(entries, each).int()
    found = []
    for cache in caches:
        pages = torch.full((3 * entries * each, size, *cache.shape[2:]), torch.nan)
        pages = pages.to(cache.dtype)
        for b in range(entries):
            for n, part in enumerate(cache[b].split(size)):
                pages[table[b, n], : part.shape[0]] = part
        found.append(pages)
    return found, table


def oracle_options(call: dict[str, Any]) -> dict[str, Any]:
    found = {n: x for n, x in call.items() if n not in ("window_size", "alibi_slopes")}
    for name, value in call.items():
        if isinstance(value, torch.Tensor) and name in found:
            found[name] = numbers(value)
    if "cache_leftpad" in found:
        found["leftpad"] = found.pop("cache_leftpad")
    return found | {n: x for n, x in peer.ours(call).items() if n in ("window", "alibi_slopes")}


def yardstick(case: SimpleNamespace, query: Any, caches: list[Any], call: Any) -> dict[str, float]:
    """The plain error of the worst entry, over the rows that it sees (caches in a row)."""
    worst = {"out": 0.0, "lse": 0.0}
    new = call["k"].shape[1] if case.new_kv else 0
    opts = peer.ours({n: call[n] for n in ("causal", "window_size") if n in call})
    for b in range(BATCH):
        place = int(call["cache_batch_idx"][b]) if case.has_batch_idx else b
        first = int(call["cache_leftpad"][b]) if case.has_leftpad else 0
        rows = slice(first, int(call["cache_seqlens"][b]) + new)
        keys, values = (numbers(x)[place, rows][None] for x in caches)
        if keys.shape[1] == 0:
            continue
        own = dict(opts)
        if case.alibi:
            own["alibi_slopes"] = numbers(call["alibi_slopes"])[b]
        found = forward_yardstick((numbers(query)[b : b + 1], keys, values), own)
        worst = {name: max(error, found[name]) for name, error in worst.items()}
    return worst


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_kvcache(case: SimpleNamespace) -> None:
    query, *caches, call = call_of(case)
    exact, *updated = reference_packed.attention_kvcache(
        numbers(query), *map(numbers, caches), **oracle_options(call)
    )
    given, table = [x.clone() for x in caches], None
    if case.page_size is not None:
        given, table = paged(caches, case.page_size)
    out, lse = fa.flash_attn_with_kvcache(
        query,
        *given,
        block_table=table,
        num_splits=case.num_splits,
        return_softmax_lse=True,
        **call,
    )
    if table is not None:
        given = [x[table.long()].flatten(1, 2)[:, : case.seqlens[1]] for x in given]
    for got, want in zip(given, updated, strict=True):
        np.testing.assert_array_equal(numbers(got).astype(np.float64), want)
    allowed = yardstick(case, query, given, call)
    assert_close(numbers(out), exact.out, allowed["out"])
    assert_close(numbers(lse), exact.lse, allowed["lse"], name="lse")
