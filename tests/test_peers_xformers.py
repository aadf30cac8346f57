"""xformers' own tests of merging and of empty tensors, run against us: its shapes and rules.

What it calls partial attention is `attention` with its lse here, its groups of heads (BMGHK) are
grouped heads, and its padded keys are kv_lengths. Where its rules stop (a part that saw no key,
the gradient of a merge) ours go on, and the oracle judges.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import flashattn as fa
import numpy as np
import pytest
import reference
import reference_packed
import torch
from peer_grid import IS_SMALL, batches
from test_merge import yardstick
from tolerance import GRADIENT_FACTOR, assert_close
from torch_numbers import numbers
from yardstick import gradient_yardstick

BFLOAT16 = torch.bfloat16


def uniform(seed: int, *shapes: tuple[int, ...], dtype: Any = BFLOAT16) -> list[Any]:
    """3 * rand, as its tests draw."""
    random = torch.Generator().manual_seed(seed)
    return [(3 * torch.rand(shape, generator=random)).to(dtype) for shape in shapes]


def normal(seed: int, *shapes: tuple[int, ...], dtype: Any = BFLOAT16) -> list[Any]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


def check_merged(merged: tuple[Any, Any], parts: list[tuple[Any, Any]]) -> None:
    """The merge of these parts by the oracle, from what the parts hold."""
    outs, lses = ([numbers(x) for x in column] for column in zip(*parts, strict=True))
    exact, allowed = reference_packed.merge_attention(outs, lses), yardstick(outs, lses)
    assert_close(numbers(merged[0]), exact[0], allowed[0])
    assert_close(numbers(merged[1]), exact[1], allowed[1], name="lse")


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("keys", [5, 600 if IS_SMALL else 100_000])
@pytest.mark.parametrize(("groups", "heads"), [(1, 11), (7, 1), (1, 1), (7, 11), (None, 11)])
def test_merge_without_bias(groups: int | None, heads: int, keys: int, stacked: bool) -> None:
    """Merging the same part twice gives it again, and log 2 more of lse."""
    batch, rows, dim = batches(13), 3, 192
    query, key, value = uniform(
        keys,
        (batch, rows, (groups or 1) * heads, dim),
        *[(batch, keys, groups or 1, dim)] * 2,
    )
    if groups is None:  # one key head, expanded: a stride of 0
        key, value = (x.expand(batch, keys, heads, dim) for x in (key, value))
    out, lse = fa.attention(query, key, value, return_lse=True)
    assert lse.shape == (batch, query.shape[2], rows)
    parts = [(out, lse)] * 2
    outs, lses = zip(*parts, strict=True)
    merged = fa.merge_attention(
        *((torch.stack(outs), torch.stack(lses)) if stacked else (outs, lses))
    )
    check_merged(merged, parts)
    assert torch.equal(merged[0], out)


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rows", [1, 2])
def test_merge_of_decoding(rows: int, groups: int, dtype: Any) -> None:
    """Ten chunks of padded caches, the last one causal, against all keys at once."""
    batch, longest, heads, dim = (4, 512, 8, 128) if IS_SMALL else (128, 8192, 8, 128)
    random = torch.Generator().manual_seed(1)
    cuts = torch.randint(1, longest // 2, (10,), generator=random).sort().values.tolist()
    cuts = [0, *cuts[1:], longest]
    lengths = torch.randint(cuts[-2] + rows, longest, (batch,), generator=random).int()
    query, key, value = normal(
        2, (batch, rows, groups * heads, dim), *[(batch, longest, groups, dim)] * 2, dtype=dtype
    )
    parts = []
    for start, end in pairwise(cuts):
        own = (lengths.clamp(max=end) - start).clamp(min=0)
        keys, values = key[:, start:end], value[:, start:end]
        causal = end == longest
        parts.append(fa.attention_forward(query, keys, values, kv_lengths=own, causal=causal))
    out, lse = fa.merge_attention(*zip(*parts, strict=True))
    check_merged((out, lse), parts)
    # Of bfloat16 parts each is rounded on its own, which the whole is not.
    if dtype == torch.float32:
        whole = fa.attention_forward(query, key, value, kv_lengths=lengths, causal=True)
        assert torch.allclose(out, whole[0], rtol=0, atol=2e-6)
        assert torch.allclose(lse, whole[1], rtol=0, atol=2e-6)


@pytest.mark.parametrize("kv_heads", [2, 32])
def test_merge_of_a_shared_prefix(kv_heads: int) -> None:
    """Two queries attend to one copy of their common 20 keys; the third has none in common."""
    shared, lengths, heads, dim = 20, [30, 35, 40], 32, 128
    query, key, value = normal(1, (3, heads, dim), *[(3, 64, kv_heads, dim)] * 2)
    key[1, :shared], value[1, :shared] = key[0, :shared], value[0, :shared]

    def rows(x: Any, starts: list[int]) -> Any:
        return torch.cat([x[b, s:n] for b, (s, n) in enumerate(zip(starts, lengths, strict=True))])

    def packed(starts: list[int]) -> tuple[Any, Any]:
        counts = [n - s for s, n in zip(starts, lengths, strict=True)]
        cu_k = np.cumsum([0, *counts]).tolist()
        keys, values = rows(key, starts), rows(value, starts)
        return fa.attention_varlen(query, keys, values, [0, 1, 2, 3], cu_k, causal=True)

    whole = packed([0, 0, 0])
    prefix = fa.attention_varlen(
        query, key[0, :shared], value[0, :shared], [0, 2, 3], [0, shared, shared]
    )
    parts = [prefix, packed([shared, shared, 0])]
    assert torch.isneginf(prefix[1][:, 2]).all()
    out, lse = fa.merge_attention(*zip(*parts, strict=True))
    check_merged((out[None], lse[None]), [(a[None], b[None]) for a, b in parts])
    assert torch.equal(out[2], whole[0][2])
    # 16 rows of a key head are the lane kernel's work, whose exponentials are right to 1.0e-4 in
    # bfloat16 (degree 3, cpu/math.h); fewer are decode's, which has them of degree 6.
    assert torch.allclose(lse, whole[1], rtol=0, atol=2e-6 if kv_heads == heads else 1e-4)


@pytest.mark.parametrize("groups", [1, 2])
def test_merge_of_random_parts(groups: int) -> None:
    """Parts that no attention made: sixteen, float32."""
    batch, rows = (2, 37) if IS_SMALL else (12, 137)
    heads, dim, splits = 8 * groups, 128, 16
    outs, lses = normal(
        3, (splits, batch, rows, heads, dim), (splits, batch, heads, rows), dtype=torch.float32
    )
    check_merged(fa.merge_attention(outs, lses), list(zip(outs, lses, strict=True)))


@pytest.mark.parametrize(
    ("cuts", "dtype"),
    [((0, 50), BFLOAT16), ((0, 50), torch.float32), ((0, 25, 50), torch.float32)],
)
def test_merge_in_training(cuts: tuple[int, ...], dtype: Any) -> None:
    """Gradients through the merge of one part and of two halves are the whole's. (Halves in
    bfloat16 are each rounded on their own, which the whole is not.)
    """
    query, key, value, dout = uniform(1, *[(1, 50, 1, 128)] * 4, dtype=dtype)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    parts = [
        fa.attention(query, key[:, a:b], value[:, a:b], return_lse=True) for a, b in pairwise(cuts)
    ]
    out, _ = fa.merge_attention(*zip(*parts, strict=True))
    found = torch.autograd.grad(out, leaves, dout)
    arrays = tuple(map(numbers, leaves))
    exact = reference.attention_backward(numbers(dout), *arrays)
    allowed = gradient_yardstick(numbers(dout), arrays, None, {})
    for name, got in zip(("dq", "dk", "dv"), found, strict=True):
        want = getattr(exact, name)
        assert_close(numbers(got), want, allowed[name], factor=GRADIENT_FACTOR, name=name)


def test_merge_of_nothing() -> None:
    with pytest.raises(ValueError, match=r"outs \(empty\) must hold at least one"):
        fa.merge_attention([], [])


def test_heads_become_rows() -> None:
    """Sequences of one row and 15 heads, or three times as many of 5 heads: the same bits."""
    rows, factor, heads, dim = 2, 3, 5, 128
    tensors = uniform(1, *[(rows, factor * heads, dim)] * 3)
    out, lse = fa.attention_varlen(*tensors, range_of(rows), range_of(rows))
    apart = [x.reshape(rows * factor, heads, dim) for x in tensors]
    more = range_of(rows * factor)
    out_apart, lse_apart = fa.attention_varlen(*apart, more, more)
    assert torch.equal(out.reshape(out_apart.shape), out_apart)
    turned = lse.reshape(factor, heads, rows).permute(1, 2, 0).reshape(lse_apart.shape)
    assert torch.equal(turned, lse_apart)


def range_of(count: int) -> list[int]:
    return list(range(count + 1))


# batch, seqlen_q, seqlen_k, heads, head_dim, value_dim
SHAPES = [
    (1, 32, 32, 1, 32, 32),
    (1, 256, 15, 1, 32, 32),
    (2, 2, 128, 1, 32, 32),
    (1, 256, 128, 1, 31, 31),
    (1, 256, 128, 1, 264, 264),
    (1, 256, 128, 1, 36, 32),
    (4, 16, 1024, 1, 128, 128),
    (1, 256, 128, 12, 64, 64),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("empty", ["query", "keys", "batch"])
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16, torch.float32], ids=str)
def test_empty_tensors(shape: tuple[int, ...], empty: str, dtype: Any) -> None:
    """Nothing in, nothing or 0 out, and gradients of the right shapes that are 0."""
    batch, rows, keys, heads, dim, value_dim = shape
    batch, rows, keys = (
        0 if empty == name else size
        for name, size in (("batch", batch), ("query", rows), ("keys", keys))
    )
    inputs = uniform(
        1,
        (batch, rows, heads, dim),
        (batch, keys, heads, dim),
        (batch, keys, heads, value_dim),
        dtype=dtype,
    )
    leaves = [x.requires_grad_() for x in inputs]
    out, lse = fa.attention(*leaves, return_lse=True)
    assert out.shape == (batch, rows, heads, value_dim)
    assert lse.shape == (batch, heads, rows)
    assert not out.any()
    assert torch.isneginf(lse).all()
    out.backward(torch.ones_like(out))
    for leaf in leaves:
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()
