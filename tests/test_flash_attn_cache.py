"""flash_attn's functions on caches and partial results: the bits of ours under its names."""

from __future__ import annotations

from typing import Any

import flashattn as fa
import ml_dtypes
import numpy as np
import pytest
import torch
from test_kvcache import Cache, copied
from torch_numbers import tensors

CAUSAL = (("causal", True),)
CACHES = [
    Cache((0, 5, 96), heads=6),
    Cache((0, 5, 90), heads=6, new=4, seqlen_q=4, options=CAUSAL),
    Cache((3, 40), heads=6, new=1, rotary="interleaved", dtype="bfloat16"),
    Cache((3, 40), heads=6, new=5, seqlen_q=5, rotary="halves", options=CAUSAL, dtype="float16"),
    Cache((20, 50), leftpad=(3, 40), new=3, seqlen_q=3, page_size=8, options=CAUSAL),
    Cache((17, 63), new=2, page_size=16, options=(("window", (9, 0)),), rotary="halves"),
]


@pytest.mark.parametrize("case", CACHES)
@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_with_kvcache(case: Cache, num_splits: int) -> None:
    """The bits of attention_kvcache, which test_kvcache holds against the oracle, and its cache."""
    call = case.arrays()
    if case.page_size is not None:
        call = case.paged(call)

    def tensor(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(x.copy())

    given = {name: tensor(x) for name, x in copied(call).items()}
    first = [given.pop(name) for name in ("query", "k_cache", "v_cache")]
    again = [x.clone() for x in first]
    out, lse = fa.attention_kvcache(*first, **given)
    names = {"window": "window_size", "leftpad": "cache_leftpad"}
    theirs = {names.get(name, name): x for name, x in given.items()}
    got = fa.flash_attn_with_kvcache(
        *again, **theirs, num_splits=num_splits, return_softmax_lse=True
    )
    assert torch.equal(got[0], out)
    assert torch.equal(got[1], lse)
    for one, other in zip(again[1:], first[1:], strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    assert torch.equal(fa.flash_attn_with_kvcache(*again, **theirs), out)


def test_with_kvcache_of_whole_caches() -> None:
    q, k, v = tensors((2, 1, 6, 16), (2, 40, 2, 16), (2, 40, 2, 16))
    expected = fa.flash_attn_func(q, k, v, causal=True)
    for lengths in (None, 40, torch.tensor([40, 40], dtype=torch.int32)):
        got = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
        assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="cache_seqlens"):
        fa.flash_attn_with_kvcache(q, k, v, q[:, :, :2], q[:, :, :2])


def test_combine() -> None:
    """Parts over disjoint keys become the whole; lse is (batch, seqlen, heads) here."""
    q, k, v = tensors((2, 5, 6, 16), (2, 90, 2, 16), (2, 90, 2, 16))
    parts = [
        fa.attention_forward(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 20), (20, 20), (20, 90))
    ]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    whole, lse = fa.attention_forward(q, k, v)
    got, got_lse = fa.flash_attn_combine(outs, lses.transpose(-1, -2))
    assert torch.allclose(got, whole, rtol=0, atol=2e-6)
    assert torch.allclose(got_lse, lse.transpose(1, 2), rtol=0, atol=2e-6)
    place = torch.empty(2, 5, 6, 16, dtype=torch.bfloat16)
    half, _ = fa.flash_attn_combine(outs, lses.transpose(-1, -2), place, torch.bfloat16)
    assert half is place
    assert torch.equal(half, got.bfloat16())
