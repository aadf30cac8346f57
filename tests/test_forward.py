"""Forward: out and lse against the float64 oracle, awkward shapes first, on every target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import DTYPES, Case, build, check_arrays, check_forward, check_result
from targets import Target

CAUSAL = (False, True, "top_left")


def _case(
    batch: int,
    heads: int,
    kv_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    value_dim: int | None = None,
) -> Case:
    return Case(batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, value_dim)


# The smallest, the ragged, Tq > Tk and Tq < Tk, groups, odd head_dims, value_dim apart.
SHAPES = [
    _case(1, 1, 1, 1, 1, 1),
    _case(1, 1, 1, 1, 1, 64),
    _case(1, 1, 1, 3, 5, 1, 7),
    _case(2, 3, 3, 7, 5, 3),
    _case(1, 1, 1, 100, 1, 16),
    _case(1, 2, 1, 5, 9, 16),
    _case(1, 8, 1, 1, 77, 64),
    _case(2, 4, 2, 33, 65, 59),
    _case(1, 2, 2, 64, 128, 64),
    _case(1, 2, 2, 65, 129, 64),
    _case(1, 2, 2, 130, 70, 64),
    _case(1, 1, 1, 63, 127, 72),
    _case(1, 6, 2, 13, 37, 80),
    _case(1, 1, 1, 17, 200, 111),
    _case(1, 1, 1, 40, 48, 128),
    _case(1, 1, 1, 20, 33, 200),
    _case(1, 1, 1, 19, 35, 256),
    _case(1, 2, 1, 9, 70, 64, 32),
    _case(1, 2, 1, 9, 70, 32, 72),
    _case(3, 2, 2, 129, 257, 40, 24),
]


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda c: c.id)
def test_matches_the_oracle(target: Target, shape: Case, dtype: str, causal: bool | str) -> None:
    check_forward(target, replace(shape, dtype=dtype, causal=causal))


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dim_512(target: Target, dtype: str) -> None:
    case = Case(1, 2, 1, 5, 70, 512, dtype=dtype)
    if target.max_head_dim < 512:
        problem = build(case)
        with pytest.raises(NotImplementedError, match="head_dim"):
            target.forward(*problem.inputs)
        return
    check_forward(target, case)


@pytest.mark.parametrize("scale", [0.0, -1.0, 0.02, 3.0])
def test_scale(target: Target, scale: float) -> None:
    check_forward(target, Case(1, 2, 1, 21, 43, 24, scale=scale))


OPTIONS = {
    "softcap": {"softcap": 1.5},
    "mask_bool": {"mask": "bool"},
    "mask_bool_keys": {"mask": "bool_keys"},
    "mask_additive": {"mask": "additive"},
    "mask_additive_keys": {"mask": "additive_keys"},
    "mask_holes": {"mask": "holes"},
    "alibi": {"alibi": "head"},
    "alibi_batch": {"alibi": "batch", "causal": True},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.3},
    "everything": {
        "softcap": 2.0,
        "mask": "holes",
        "alibi": "batch",
        "sinks": True,
        "dropout_p": 0.2,
        "causal": True,
        "window": (20, 3),
        "kv_lengths": (41, 30),
        "scale": 0.3,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_score_options(target: Target, name: str) -> None:
    check_forward(target, replace(Case(2, 4, 2, 21, 43, 24), **OPTIONS[name]))


def _restride(x: np.ndarray, kind: str) -> np.ndarray:
    """The same values behind other strides."""
    if kind == "transposed":  # (batch, heads, seqlen, dim) in memory
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    if kind == "reversed":
        return np.ascontiguousarray(x[:, ::-1])[:, ::-1]
    if kind == "all_reversed":
        return np.ascontiguousarray(x[::-1, ::-1, ::-1, ::-1])[::-1, ::-1, ::-1, ::-1]
    if kind == "dim_first":
        return np.ascontiguousarray(x.transpose(3, 1, 2, 0)).transpose(3, 1, 2, 0)
    padded = np.full((x.shape[0], x.shape[1] + 1, x.shape[2], 2 * x.shape[3] + 1), np.nan, x.dtype)
    # "offset" starts at an odd element, so that no row is aligned.
    view = padded[:, :-1, :, 1::2] if kind == "step_2" else padded[:, 1:, :, 3 : 3 + x.shape[3]]
    view[...] = x
    return view


STRIDES = ("transposed", "reversed", "all_reversed", "dim_first", "step_2", "offset")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", STRIDES)
def test_strides_change_nothing(target: Target, kind: str, dtype: str) -> None:
    problem = build(Case(2, 4, 2, 13, 37, 17, dtype=dtype, causal=True))
    plain = target.forward(*problem.inputs, causal=True)
    moved = target.forward(*(_restride(x, kind) for x in problem.inputs), causal=True)
    np.testing.assert_array_equal(moved[0], plain[0])
    np.testing.assert_array_equal(moved[1], plain[1])


@pytest.mark.parametrize("axis", range(4))
def test_stride_zero(target: Target, axis: int) -> None:
    problem = build(Case(2, 4, 2, 13, 37, 16))

    def flat(x: np.ndarray) -> np.ndarray:
        return np.broadcast_to(x.take([0], axis=axis), x.shape)

    views = tuple(flat(x) for x in problem.inputs)
    copies = tuple(np.ascontiguousarray(x) for x in views)
    for got, expected in zip(target.forward(*views), target.forward(*copies), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_stride_of_a_size_one_axis_means_nothing(target: Target) -> None:
    problem = build(Case(1, 1, 1, 1, 9, 16))
    odd = np.lib.stride_tricks.as_strided(
        problem.query, strides=(1 << 40, -(1 << 41), 1 << 39, problem.dtype.itemsize)
    )
    for got, expected in zip(
        target.forward(odd, problem.key, problem.value),
        target.forward(*problem.inputs),
        strict=True,
    ):
        np.testing.assert_array_equal(got, expected)


def test_layout_bhsd(target: Target) -> None:
    problem = build(Case(2, 4, 2, 13, 37, 16, 24, causal=True))
    swapped = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in problem.inputs)
    out, lse = target.forward(*swapped, causal=True, layout="bhsd")
    expected = target.forward(*problem.inputs, causal=True)
    np.testing.assert_array_equal(out.transpose(0, 2, 1, 3), expected[0])
    np.testing.assert_array_equal(lse, expected[1])


@pytest.mark.parametrize("sizes", [(0, 4, 5), (2, 0, 5), (2, 4, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("causal", CAUSAL)
def test_empty(target: Target, sizes: tuple[int, int, int], causal: bool | str) -> None:
    batch, seqlen_q, seqlen_k = sizes
    problem = build(Case(batch, 4, 2, seqlen_q, seqlen_k, 8, causal=causal))
    out, lse = target.forward(*problem.inputs, causal=causal)
    assert out.shape == (batch, seqlen_q, 4, 8)
    assert lse.shape == (batch, 4, seqlen_q)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_is_overwritten(target: Target, dtype: str) -> None:
    """A poisoned `out` is filled to the last element, dead rows included, and handed back."""
    problem = build(Case(1, 2, 2, 40, 25, 20, dtype=dtype, causal=True))
    room = np.full(problem.oracle.out.shape, np.nan, problem.dtype)
    out, lse = target.forward(*problem.inputs, causal=True, out=room)
    assert out is room
    assert (np.asarray(out)[:, :15].astype(np.float32) == 0).all()
    assert np.isneginf(lse[..., :15]).all()
    check_result(problem, out, lse)


def test_huge_logits(target: Target) -> None:
    """Scores of several thousand: softmax is one-hot, and nothing overflows."""
    problem = build(Case(1, 2, 2, 33, 70, 64, magnitude=40.0))
    assert np.abs(problem.oracle.lse).max() > 3e3
    check_forward(target, problem.case)


def test_row_max_that_rises_and_falls(target: Target) -> None:
    """Keys sorted by score, both ways: every block of the online softmax rescales, or none does."""
    rng = np.random.default_rng(5)
    query = np.ones((1, 3, 1, 8), np.float32)
    rise = np.sort(rng.uniform(-60, 60, 300)).astype(np.float32)
    value = rng.standard_normal((1, 300, 1, 8)).astype(np.float32)
    for order in (rise, rise[::-1]):
        key = np.repeat(order[None, :, None, None], 8, axis=3) / np.float32(8)
        check_arrays(target, query, key, value)


def test_value_identity_returns_probabilities(target: Target) -> None:
    problem = build(Case(1, 2, 2, 9, 31, 12))
    eye = np.broadcast_to(np.eye(31, dtype=np.float32)[None, :, None, :], (1, 31, 2, 31)).copy()
    out, _lse = target.forward(problem.query, problem.key, eye)
    np.testing.assert_allclose(out.sum(-1), 1.0, atol=5e-7)
    check_arrays(target, problem.query, problem.key, eye)


@pytest.mark.parametrize("dtype", DTYPES)
def test_known_answers_of_causal(target: Target, dtype: str) -> None:
    def run(seqlen_q: int, seqlen_k: int) -> tuple[Any, Any]:
        kind = DTYPES[dtype]
        value = np.arange(seqlen_k).reshape(1, -1, 1, 1).astype(kind)
        return target.forward(
            np.zeros((1, seqlen_q, 1, 1), kind),
            np.zeros((1, seqlen_k, 1, 1), kind),
            value,
            causal=True,
        )

    out, _ = run(2, 5)
    np.testing.assert_array_equal(out.ravel().astype(np.float32), [1.5, 2.0])
    out, lse = run(5, 2)
    np.testing.assert_array_equal(out.ravel().astype(np.float32), [0, 0, 0, 0, 0.5])
    np.testing.assert_allclose(lse.ravel(), [-np.inf] * 3 + [0.0, np.log(2.0)], rtol=1e-6)


def test_float16_beyond_its_range(target: Target) -> None:
    """Products that overflow float16 are harmless: scores are float32."""
    query = np.full((1, 4, 1, 64), 60.0, np.float16)
    key = np.full((1, 9, 1, 64), 60.0, np.float16)
    value = np.arange(9, dtype=np.float16).reshape(1, 9, 1, 1)
    out, lse = target.forward(query, key, value)
    np.testing.assert_array_equal(out.ravel(), [4.0] * 4)
    np.testing.assert_allclose(lse.ravel(), 60.0 * 60.0 * 8.0 + np.log(9.0), rtol=1e-6)
