"""flash-attention's own test grid of whole batches, run against our functions of its names.

The axes, their values, batch and head counts are those of upstream's tests/test_flash_attn.py; the
judgement is ours: the float64 oracle and the one tolerance rule. tests/peer_grid.py says how much
of a grid a run takes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import flashattn as fa
import numpy as np
import peer_flash_attn as peer
import pytest
import torch
from peer_flash_attn import DTYPES, FLAGS, HEAD_DIMS, check_dense, options, randn
from peer_grid import batches, case_id, lengths, sample, sizes
from torch_numbers import numbers

QKV_PACKED = {
    **peer.QKV_PACKED,
    "d": HEAD_DIMS,
    "seqlen": lengths([97, 128, 200, 384, 768, 1024, 1025, 2048]),
}
OUTPUT = {
    **peer.OUTPUT,
    "d": tuple(d for d in HEAD_DIMS if d != 80),
    "seqlens": sizes(peer.CROSS),
}
BOTTOM_RIGHT = {
    "dtype": DTYPES,
    "local": FLAGS,
    "swap": FLAGS,
    "d": HEAD_DIMS,
    "seqlens": sizes(peer.CAUSAL),
}
SPLIT = {
    "dtype": DTYPES,
    "deterministic": FLAGS,
    "alibi": FLAGS,
    "local": FLAGS,
    "causal": FLAGS,
    "swap": FLAGS,
    "d": HEAD_DIMS,
    "seqlens": sizes(
        [
            *[(3, 1024), (1, 339), (64, 800), (3, 799), (64, 2048)],
            *[(16, 20000), (16, 100000), (128, 128), (256, 256)],
        ]
    ),
}


def is_upstreams(case: SimpleNamespace) -> bool:
    """Upstream refuses softcap together with dropout, and its tests leave the pair out."""
    return not (case.softcap and case.dropout_p)


OVERFLOW = {"d": (16, 32, 64), "causal": FLAGS, "seqlen": (1, 2, 5, 17, 128)}
TRANSPOSED = {"dtype": DTYPES, "d": (64, 128), "causal": FLAGS, "seqlen": (97, 128, 200, 256)}


@pytest.mark.parametrize("case", sample(QKV_PACKED, 8), ids=case_id)
def test_qkvpacked(case: SimpleNamespace) -> None:
    batch, heads, random = batches(4), 9, peer.generator(case)
    qkv = randn(random, case.dtype, batch, case.seqlen, 3, heads, case.d, grad=False)
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(2))
    opts = options(case, (batch, heads), case.seqlen, random)

    def call() -> Any:
        packed = torch.stack([q, k, v], 2)
        return fa.flash_attn_qkvpacked_func(
            packed, deterministic=case.deterministic, return_attn_probs=True, **opts
        )

    check_dense(call, (q, k, v), opts)


@pytest.mark.parametrize("case", sample(OUTPUT, 8, is_upstreams), ids=case_id)
def test_output(case: SimpleNamespace) -> None:
    batch, random = batches(4), peer.generator(case)
    heads = 4 if case.softcap else 6
    kv_heads = {"mha": heads, "mqa": 1, "gqa": 2}[case.mha_type]
    rows, keys = case.seqlens
    q = randn(random, case.dtype, batch, rows, heads, case.d)
    k, v = (randn(random, case.dtype, batch, keys, kv_heads, case.d) for _ in range(2))
    opts = options(case, (batch, heads), keys, random)
    more = {"deterministic": case.deterministic, "return_attn_probs": True}

    def call() -> Any:
        if case.kvpacked:
            return fa.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **opts, **more)
        return fa.flash_attn_func(q, k, v, **opts, **more)

    check_dense(call, (q, k, v), opts)


def check_swapped(case: SimpleNamespace, batch: int, heads: int, opts_of: Any) -> None:
    """Grids in which queries and keys may change places."""
    random = peer.generator(case)
    rows, keys = reversed(case.seqlens) if case.swap else case.seqlens
    q = randn(random, case.dtype, batch, rows, heads, case.d)
    k, v = (randn(random, case.dtype, batch, keys, heads, case.d) for _ in range(2))
    opts = opts_of(keys, random)
    check_dense(
        lambda: fa.flash_attn_func(q, k, v, **opts, return_attn_probs=True), (q, k, v), opts
    )


@pytest.mark.parametrize("case", sample(BOTTOM_RIGHT, 8), ids=case_id)
def test_causal(case: SimpleNamespace) -> None:
    batch, heads = batches(8), 9
    always = SimpleNamespace(**vars(case), causal=True)
    check_swapped(
        case, batch, heads, lambda keys, random: options(always, (batch, heads), keys, random)
    )


@pytest.mark.parametrize("case", sample(SPLIT, 8), ids=case_id)
def test_splitkv(case: SimpleNamespace) -> None:
    heads = 12
    check_swapped(case, 1, heads, lambda keys, random: options(case, (1, heads), keys, random))


@pytest.mark.parametrize("case", sample(OVERFLOW, 5), ids=case_id)
def test_backward_overflow(case: SimpleNamespace) -> None:
    """Large inputs in float16, where keys past the end once became infinite in backward."""
    random = torch.Generator().manual_seed(case.seqlen)
    q = (5 * randn(random, torch.float16, 2, case.seqlen, 5, case.d)).detach().requires_grad_()
    k, v = (
        (3 * randn(random, torch.float16, 2, case.seqlen, 5, case.d)).detach().requires_grad_()
        for _ in range(2)
    )
    opts = {"causal": case.causal}
    check_dense(
        lambda: fa.flash_attn_func(q, k, v, **opts, return_attn_probs=True), (q, k, v), opts
    )


@pytest.mark.parametrize("case", sample(TRANSPOSED, 4), ids=case_id)
def test_backward_of_transposed_gradient(case: SimpleNamespace) -> None:
    """dout whose batch axis is every second one of a wider array, behind seqlen in memory."""
    random = torch.Generator().manual_seed(case.seqlen)
    q, k, v = (randn(random, case.dtype, 5, case.seqlen, 2, case.d) for _ in range(3))
    wide = randn(random, case.dtype, case.seqlen, 10, 2, case.d, grad=False)
    dout = wide[:, ::2].transpose(0, 1)
    out = fa.flash_attn_func(q, k, v, causal=case.causal)
    strided = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    packed = torch.autograd.grad(out, (q, k, v), dout.contiguous())
    for one, other in zip(strided, packed, strict=True):
        np.testing.assert_array_equal(numbers(one), numbers(other))
