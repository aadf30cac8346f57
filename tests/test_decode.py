"""Decode: a few query rows against many keys, where backends switch to another kernel.

The switch must not show: the rows equal the oracle, and equal the same rows taken from a call too
tall to be decode, within the rule of tests/tolerance.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reference
from cases import DTYPES, Case, build, check_forward
from targets import Target
from tolerance import assert_close
from yardstick import forward_yardstick

GROUPS = [(1, 1), (8, 8), (8, 2), (6, 1), (5, 5)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", GROUPS, ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 2, 3, 7])
def test_matches_the_oracle(
    target: Target, seqlen_q: int, heads: tuple[int, int], dtype: str
) -> None:
    check_forward(target, Case(2, *heads, seqlen_q, 777, 64, dtype=dtype, causal=True))


@pytest.mark.parametrize(
    "sizes",
    [(1, 1), (3, 5), (64, 64), (72, 80), (111, 111), (128, 128), (200, 33), (256, 256)],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(target: Target, sizes: tuple[int, int], dtype: str) -> None:
    check_forward(target, Case(1, 4, 2, 1, 300, *sizes, dtype=dtype))


@pytest.mark.parametrize("seqlen_k", [1, 2, 127, 128, 129, 255, 256, 257, 511, 513, 1025, 3001])
def test_lengths_around_every_chunk(target: Target, seqlen_k: int) -> None:
    check_forward(target, Case(1, 4, 2, 1, seqlen_k, 32))
    check_forward(target, Case(1, 4, 2, 2, seqlen_k, 32, causal=True))


@pytest.mark.parametrize("window", [(100, 0), (0, 0), (600, -1), (-1, -1)], ids=str)
def test_window_and_lengths(target: Target, window: tuple[int, int]) -> None:
    """Chunks that a row does not see at all, entries of every length, an empty one among them."""
    case = Case(5, 4, 2, 1, 777, 32, window=window, kv_lengths=(777, 0, 1, 300, 513), causal=True)
    check_forward(target, case)
    check_forward(target, replace(case, seqlen_q=3))


def test_stale_rows_behind_the_length(target: Target) -> None:
    """NaN and Inf behind kv_lengths stay there."""
    problem = build(Case(3, 4, 2, 1, 600, 32, kv_lengths=(599, 257, 0), causal=True))
    clean = target.forward(*problem.inputs, **problem.options)
    key, value = problem.key.copy(), problem.value.copy()
    for b, length in enumerate(problem.case.kv_lengths or ()):
        key[b, length:], value[b, length:] = np.nan, np.inf
    stale = target.forward(problem.query, key, value, **problem.options)
    np.testing.assert_array_equal(stale[0], clean[0])
    np.testing.assert_array_equal(stale[1], clean[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)], ids=str)
def test_same_as_the_tall_call(target: Target, heads: tuple[int, int], dtype: str) -> None:
    """The last row alone against the last row of 80: two kernels, one answer."""
    problem = build(Case(2, *heads, 80, 700, 64, dtype=dtype, causal=True))
    tall = target.forward(*problem.inputs, causal=True)
    last = target.forward(problem.query[:, -1:], problem.key, problem.value, causal=True)
    exact = problem.oracle.out[:, -1:], problem.oracle.lse[:, :, -1:]
    plain = build(replace(problem.case, seqlen_q=1)).yardstick
    for got in ((tall[0][:, -1:], tall[1][:, :, -1:]), last):
        assert_close(got[0], exact[0], plain["out"])
        assert_close(got[1], exact[1], plain["lse"], name="lse")


def test_cache_as_a_slice_of_a_longer_one(target: Target) -> None:
    """(B, Hkv, S, D) cache seen in layout bhsd through a slice: strides of the long cache, rows of
    the short.
    """
    rng = np.random.default_rng(3)
    cache_k, cache_v = (np.full((2, 2, 1024, 64), np.nan, np.float32) for _ in range(2))
    query = rng.standard_normal((2, 8, 1, 64)).astype(np.float32)
    for length in (1, 8, 9, 79, 500):
        cache_k[:, :, :length] = rng.standard_normal((2, 2, length, 64))
        cache_v[:, :, :length] = rng.standard_normal((2, 2, length, 64))
        key, value = cache_k[:, :, :length], cache_v[:, :, :length]
        out, lse = target.forward(query, key, value, layout="bhsd")
        bshd = [x.transpose(0, 2, 1, 3) for x in (query, key, value)]
        exact, plain = reference.attention(*bshd), forward_yardstick(tuple(bshd), {})
        assert_close(out.transpose(0, 2, 1, 3), exact.out, plain["out"])
        assert_close(lse, exact.lse, plain["lse"], name="lse")
