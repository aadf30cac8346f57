"""flash-attention's own test grid of packed sequences, run against our functions of its names.

As test_peers_flash_attn.py; gradients too are held against the float64 oracle, sequence by
sequence.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import flashattn as fa
import peer_flash_attn as peer
import pytest
import torch
from peer_flash_attn import DTYPES, FLAGS, HEAD_DIMS, check_packed, options, randn
from peer_grid import batches, case_id, lengths, sample, sizes
from test_peers_flash_attn import is_upstreams

QKV_PACKED = {
    **peer.QKV_PACKED,
    "d": tuple(d for d in HEAD_DIMS if d not in (40, 111)),
    "seqlen": lengths([97, 128, 200, 257, 384, 512, 768, 1025, 2048]),
}
OUTPUT = {
    **peer.OUTPUT,
    "d": tuple(d for d in HEAD_DIMS if d != 40),
    "seqlens": sizes([(1, 147), *peer.CROSS]),
}
BOTTOM_RIGHT = {
    "dtype": DTYPES,
    "local": FLAGS,
    "swap": FLAGS,
    "page_size": (None, 256, 512),
    "d": HEAD_DIMS,
    "seqlens": sizes(peer.CAUSAL),
}
OVERFLOW = {"d": (16, 32, 64), "causal": FLAGS}


def starts_of(longest: int, batch: int, random: torch.Generator) -> list[int]:
    """cu_seqlens of sequences that are at most 20 rows shorter than the longest may be."""
    found = [0]
    for _ in range(batch):
        length = int(torch.randint(max(1, longest - 20), longest + 1, (), generator=random))
        found.append(found[-1] + length)
    return found


def int32(starts: list[int]) -> torch.Tensor:
    return torch.tensor(starts, dtype=torch.int32)


def longest(starts: list[int]) -> int:
    return int(int32(starts).diff().max())


@pytest.mark.parametrize("case", sample(QKV_PACKED, 8), ids=case_id)
def test_qkvpacked(case: SimpleNamespace) -> None:
    batch, heads, random = batches(5), 6, peer.generator(case)
    starts = starts_of(case.seqlen, batch, random)
    q, k, v = (randn(random, case.dtype, starts[-1], heads, case.d) for _ in range(3))
    opts = options(case, (batch, heads), case.seqlen, random)

    def call() -> Any:
        return fa.flash_attn_varlen_qkvpacked_func(
            torch.stack([q, k, v], 1),
            int32(starts),
            longest(starts),
            deterministic=case.deterministic,
            return_attn_probs=True,
            **opts,
        )

    check_packed(call, (q, k, v), (starts, starts), opts)


@pytest.mark.parametrize("case", sample(OUTPUT, 8, is_upstreams), ids=case_id)
def test_output(case: SimpleNamespace) -> None:
    batch, random = batches(4), peer.generator(case)
    heads = 4 if case.softcap else 6
    kv_heads = {"mha": heads, "mqa": 1, "gqa": 2}[case.mha_type]
    rows, keys = (starts_of(length, batch, random) for length in case.seqlens)
    q = randn(random, case.dtype, rows[-1], heads, case.d)
    k, v = (randn(random, case.dtype, keys[-1], kv_heads, case.d) for _ in range(2))
    opts = options(case, (batch, heads), case.seqlens[1], random)
    where = (int32(rows), int32(keys), longest(rows), longest(keys))
    more = {"deterministic": case.deterministic, "return_attn_probs": True, **opts}

    def call() -> Any:
        if case.kvpacked:
            return fa.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *where, **more)
        return fa.flash_attn_varlen_func(q, k, v, *where, **more)

    check_packed(call, (q, k, v), (rows, keys), opts)


def pages_of(x: Any, starts: list[int], size: int, random: torch.Generator) -> tuple[Any, Any]:
    """The rows of each sequence in pages of random numbers, and the block table; NaN elsewhere."""
    batch, each = len(starts) - 1, -(-longest(starts) // size)
    table = torch.randperm(batch * each, generator=random).reshape(batch, each).int()
    pages = torch.full((batch * each, size, *x.shape[1:]), torch.nan, dtype=x.dtype)
    for b in range(batch):
        rows = x[starts[b] : starts[b + 1]].detach()
        for n, part in enumerate(rows.split(size)):
            pages[table[b, n], : part.shape[0]] = part
    return pages, table


@pytest.mark.parametrize("case", sample(BOTTOM_RIGHT, 8), ids=case_id)
def test_causal(case: SimpleNamespace) -> None:
    """Keys in pages have the bits of keys in a row, which take part in autograd."""
    batch, heads, random = batches(8), 9, peer.generator(case)
    always = SimpleNamespace(**vars(case), causal=True)
    lengths = case.seqlens[::-1] if case.swap else case.seqlens
    rows, keys = (starts_of(length, batch, random) for length in lengths)
    q = randn(random, case.dtype, rows[-1], heads, case.d)
    k, v = (randn(random, case.dtype, keys[-1], heads, case.d) for _ in range(2))
    opts = options(always, (batch, heads), lengths[1], random)
    where = (int32(rows), int32(keys), longest(rows), longest(keys))

    def call() -> Any:
        return fa.flash_attn_varlen_func(q, k, v, *where, return_attn_probs=True, **opts)

    check_packed(call, (q, k, v), (rows, keys), opts)
    if case.page_size is not None:
        state = random.get_state()
        k_pages, table = pages_of(k, keys, case.page_size, random)
        random.set_state(state)
        v_pages, _ = pages_of(v, keys, case.page_size, random)
        paged = fa.flash_attn_varlen_func(
            q.detach(), k_pages, v_pages, *where, block_table=table, **opts
        )
        assert torch.equal(paged, call()[0])


@pytest.mark.parametrize("case", sample(OVERFLOW, 3), ids=case_id)
def test_backward_overflow(case: SimpleNamespace) -> None:
    """Sequences of one key each under many queries, which once gave NaN in dq."""
    random = torch.Generator().manual_seed(case.d)
    rows, keys = [0, 76, 110, 256], [0, 1, 2, 3]
    q, k, v = (
        (3 * randn(random, torch.float16, count, 5, case.d)).detach().requires_grad_()
        for count in (256, 3, 3)
    )

    def call() -> Any:
        return fa.flash_attn_varlen_func(
            q, k, v, int32(rows), int32(keys), 256, 3, causal=case.causal, return_attn_probs=True
        )

    check_packed(call, (q, k, v), (rows, keys), {"causal": case.causal})
