"""Masks, softcap, ALiBi, sinks and dropout in forward: every form a mask may come in, tiles that a
mask hides or opens whole, positions and dropout counters far from 0, rows without keys.

Two heights of query everywhere: few rows and many go through different kernels (test_decode.py).
Gradients have their own files.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES, Case, build, check_arrays, check_forward
from targets import Target

FEW, MANY = 3, 75
FULL = (2, 4, MANY, 130)
MASK_DTYPES = {
    "bool": np.bool_,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}


def _inputs(seqlen_q: int, dtype: str = "float32") -> tuple[Any, Any, Any]:
    return build(Case(2, 4, 2, seqlen_q, 130, 16, 24, dtype=dtype)).inputs


def _mask(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """A third of the elements excludes."""
    rng = np.random.default_rng(seed)
    hidden = rng.random(shape) < 1 / 3
    if np.dtype(dtype) == np.bool_:
        return ~hidden
    return np.where(hidden, -np.inf, rng.standard_normal(shape)).astype(dtype)


def _check(target: Target, seqlen_q: int, mask: np.ndarray, dtype: str = "float32") -> None:
    inputs = _inputs(seqlen_q, dtype)
    if not target.refuses(lambda: target.forward(*inputs, mask=mask), {"mask": mask}):
        check_arrays(target, *inputs, mask=mask)


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("kind", ["bool", "float32"])
@pytest.mark.parametrize("pattern", list(itertools.product([False, True], repeat=4)), ids=str)
def test_every_broadcast(target: Target, pattern: tuple[bool, ...], kind: str, rows: int) -> None:
    full = (2, 4, rows, 130)
    shape = tuple(n if own else 1 for n, own in zip(full, pattern, strict=True))
    _check(target, rows, _mask(shape, MASK_DTYPES[kind], seed=sum(pattern)))


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MASK_DTYPES)
def test_every_dtype(target: Target, kind: str, dtype: str, rows: int) -> None:
    _check(target, rows, _mask((4, rows, 130), MASK_DTYPES[kind]), dtype)


RESTRIDED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "reversed": lambda m: np.ascontiguousarray(m[::-1, ::-1, ::-1, ::-1])[::-1, ::-1, ::-1, ::-1],
    "keys_first": lambda m: np.ascontiguousarray(m.transpose(3, 0, 1, 2)).transpose(1, 2, 3, 0),
    "step_2": lambda m: np.repeat(m, 2, axis=3)[..., ::2],
    "odd_row": lambda m: np.pad(m, ((0, 0),) * 3 + ((0, 3),))[..., :130],
}


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("kind", MASK_DTYPES)
@pytest.mark.parametrize("name", RESTRIDED)
def test_strides_change_nothing(target: Target, name: str, kind: str, rows: int) -> None:
    inputs, mask = _inputs(rows), _mask((2, 4, rows, 130), MASK_DTYPES[kind])
    if target.refuses(lambda: target.forward(*inputs, mask=mask), {"mask": mask}):
        return
    plain = target.forward(*inputs, mask=mask)
    view = RESTRIDED[name](mask)
    np.testing.assert_array_equal(view, mask)
    assert view.strides != mask.strides
    for got, expected in zip(target.forward(*inputs, mask=view), plain, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("kind", ["bool", "float16"])
def test_stride_zero_is_the_shape_one(target: Target, kind: str, axis: int, rows: int) -> None:
    shape = tuple(1 if a == axis else n for a, n in enumerate((2, 4, rows, 130)))
    inputs, mask = _inputs(rows), _mask(shape, MASK_DTYPES[kind])
    if target.refuses(lambda: target.forward(*inputs, mask=mask), {"mask": mask}):
        return
    expanded = np.broadcast_to(mask, (2, 4, rows, 130))
    plain = target.forward(*inputs, mask=mask)
    for got, expected in zip(target.forward(*inputs, mask=expanded), plain, strict=True):
        np.testing.assert_array_equal(got, expected)


def _tiles(kind: str, rows: int, keys: int) -> np.ndarray:
    """Visible pairs in blocks: whole tiles of every kernel are open, closed or mixed."""
    i, j = np.arange(rows)[:, None], np.arange(keys)
    patterns = {
        "tril": j <= i,
        "blocks": (i // 64 + j // 64) % 2 == 0,
        "ragged_blocks": (i // 40 + j // 96) % 2 == 0,
        "diagonal": np.abs(i - j) < 20,
        "far_corner": (i >= 190) & (j >= 390),
        "first_keys": (j < 5) | (i < 0),
        "nothing": (j < 0) | (i < 0),
        "documents": i // 50 == j // 100,
    }
    return patterns[kind]


TILES = ("tril", "blocks", "ragged_blocks", "diagonal", "far_corner", "first_keys", "nothing")


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [*TILES, "documents"])
def test_tiles_that_are_hidden_or_open_whole(
    target: Target, kind: str, dtype: str, additive: bool
) -> None:
    problem = build(Case(1, 4, 2, 200, 400, 16, dtype=dtype))
    mask: np.ndarray = _tiles(kind, 200, 400)
    if additive:
        mask = np.where(mask, np.float32(0), np.float32(-np.inf))
    for opts in ({}, {"causal": True}, {"window": (70, 30), "q_offset": 90}):
        opts = {**opts, "mask": mask}
        if target.refuses(lambda o=opts: target.forward(*problem.inputs, **o), opts):
            return
        check_arrays(target, *problem.inputs, **opts)


@pytest.mark.parametrize("kind", TILES)
def test_hidden_keys_may_hold_anything(target: Target, kind: str) -> None:
    """NaN where no row looks, in keys and in values: the bits stay."""
    for rows in (FEW, 200):
        problem = build(Case(1, 4, 2, rows, 400, 16))
        mask = _tiles(kind, 200, 400)[-rows:]
        if target.refuses(lambda p=problem, m=mask: target.forward(*p.inputs, mask=m), {"mask": 1}):
            return
        clean = target.forward(*problem.inputs, mask=mask)
        key, value = problem.key.copy(), problem.value.copy()
        key[:, ~mask.any(axis=0)] = np.nan
        value[:, ~mask.any(axis=0)] = np.inf
        dirty = target.forward(problem.query, key, value, mask=mask)
        for got, expected in zip(dirty, clean, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bad_value_reaches_the_rows_that_see_it(target: Target, dtype: str, rows: int) -> None:
    problem = build(Case(1, 4, 2, rows, 130, 16, dtype=dtype))
    mask = _mask((4, rows, 130), np.bool_, seed=5)
    if target.refuses(lambda: target.forward(*problem.inputs, mask=mask), {"mask": mask}):
        return
    clean, _ = target.forward(*problem.inputs, mask=mask)
    value = problem.value.copy()
    value[0, 77, 1, 3] = np.nan  # of kv head 1: query heads 2 and 3
    out, _ = target.forward(problem.query, problem.key, value, mask=mask)
    expected = np.zeros(out.shape, bool)
    expected[0, :, 2:, 3] = mask[2:, :, 77].T
    np.testing.assert_array_equal(np.isnan(out.astype(np.float32)), expected)
    # Such a row of values is added up on its own: elsewhere the last bit may move.
    got, unspoiled = (x.astype(np.float32)[~expected] for x in (out, clean))
    np.testing.assert_allclose(got, unspoiled, rtol=1e-2 if dtype != "float32" else 0, atol=1e-6)


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_nan_in_the_mask_is_its_rows(target: Target, rows: int) -> None:
    inputs, mask = _inputs(rows), _mask((2, 1, rows, 130), np.float32)
    mask[1, 0, 2, 40] = np.nan
    if target.refuses(lambda: target.forward(*inputs, mask=mask), {"mask": mask}):
        return
    out, lse = target.forward(*inputs, mask=mask)
    expected = np.zeros(lse.shape, bool)
    expected[1, :, 2] = True
    np.testing.assert_array_equal(np.isnan(lse), expected)
    np.testing.assert_array_equal(np.isnan(out).all(axis=-1), expected.transpose(0, 2, 1))
    np.testing.assert_array_equal(np.isnan(out).any(axis=-1), expected.transpose(0, 2, 1))


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("least", [np.finfo(np.float32).min, -1e30])
def test_a_row_of_the_lowest_finite_values_is_the_mean(
    target: Target, least: float, rows: int
) -> None:
    """Every finite value is a value: such a row loses its scores' differences and nothing else."""
    inputs = _inputs(rows)
    mask = np.zeros((rows, 130), np.float32)
    mask[1] = least
    if target.refuses(lambda: target.forward(*inputs, mask=mask), {"mask": mask}):
        return
    out, _ = target.forward(*inputs, mask=mask)
    mean = np.repeat(inputs[2].mean(axis=1, dtype=np.float64), 2, axis=1)
    np.testing.assert_allclose(out[:, 1], mean, atol=1e-6)
    check_arrays(target, *inputs, mask=mask)


def test_off_is_the_plain_call(target: Target) -> None:
    for rows in (FEW, MANY):
        inputs = _inputs(rows)
        plain = target.forward(*inputs)
        off = target.forward(
            *inputs, softcap=0.0, dropout_p=0.0, dropout_seed=5, mask=None, sinks=None
        )
        for got, expected in zip(off, plain, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("cap", [1e-30, 0.01, 1.0, 50.0, 1e6])
def test_softcaps_of_every_size(target: Target, cap: float, rows: int) -> None:
    case = Case(2, 4, 2, rows, 130, 16, softcap=cap, magnitude=3.0)
    check_forward(target, case)


@pytest.mark.parametrize("far", [2**31 - 7, 2**40, 2**59 - 55])
@pytest.mark.parametrize("rows", [FEW, MANY])
def test_distances_far_from_the_origin(target: Target, rows: int, far: int) -> None:
    """Both sides moved by the same number of positions: the same bits."""
    problem = build(Case(2, 4, 2, rows, 130, 16, alibi="batch", window=(60, 9)))
    opts = {**problem.options, "q_offset": 55, "k_offset": 0}
    if target.refuses(lambda: target.forward(*problem.inputs, **opts), opts):
        return
    check_arrays(target, *problem.inputs, **opts)
    near = target.forward(*problem.inputs, **opts)
    opts |= {"q_offset": 55 + far, "k_offset": far}
    for got, expected in zip(target.forward(*problem.inputs, **opts), near, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_distances_past_float32(target: Target, rows: int) -> None:
    """A chunk of keys 2^33 positions before the rows, with slopes that still matter there."""
    problem = build(Case(1, 4, 2, rows, 130, 16))
    opts = {"alibi_slopes": np.float32([2**-33, 0.0, -(2**-34), 2**-40]), "q_offset": 2**33}
    if target.refuses(lambda: target.forward(*problem.inputs, **opts), opts):
        return
    check_arrays(target, *problem.inputs, **opts)


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("window", [None, (2, 0)])
def test_sinks_of_rows_without_keys(
    target: Target, window: tuple[int, int] | None, rows: int
) -> None:
    problem = build(Case(2, 4, 2, rows, 130, 16))
    sinks = np.float32([0.3, -2.0, 40.0, -np.inf])
    opts: dict[str, Any] = {"sinks": sinks, "kv_lengths": np.int32([0, 130]), "causal": True}
    if window is not None:
        opts |= {"window": window, "q_offset": np.int64([0, 131]), "causal": False}
    if target.refuses(lambda: target.forward(*problem.inputs, **opts), opts):
        return
    out, lse = check_arrays(target, *problem.inputs, **opts)
    assert (out[0] == 0).all()
    np.testing.assert_array_equal(lse[0], np.broadcast_to(sinks[:, None], (4, rows)))
    if window is not None:  # row i sees keys 129 + i ... 131 + i
        assert (out[1, 1:] == 0).all()
        np.testing.assert_array_equal(lse[1, :, 1:], np.broadcast_to(sinks[:, None], (4, rows - 1)))


def test_sinks_without_any_key(target: Target) -> None:
    opts = {"sinks": np.float32([1.5, -3.0])}
    query, none = np.ones((2, 5, 2, 4), np.float32), np.ones((2, 0, 2, 4), np.float32)
    if target.refuses(lambda: target.forward(query, none, none, **opts), opts):
        return
    out, lse = target.forward(query, none, none, **opts)
    assert (out == 0).all()
    np.testing.assert_array_equal(lse, np.broadcast_to(opts["sinks"][:, None], (2, 2, 5)))


@pytest.mark.parametrize("rows", [FEW, 20, MANY])
@pytest.mark.parametrize("keys", [128, 129, 130, 131])
@pytest.mark.parametrize("start", [0, 1, 2, 3, 64])
def test_dropout_at_every_alignment(target: Target, start: int, keys: int, rows: int) -> None:
    """Element numbers that are and are not multiples of four, numbered past 2^32 and 2^64."""
    shape = (2, 4, rows, 60)
    query, key = np.zeros((2, rows, 4, 4), np.float32), np.zeros((2, 60, 2, 4), np.float32)
    value = np.broadcast_to(np.eye(60, dtype=np.float32)[None, :, None, :], (2, 60, 2, 60))
    opts: dict[str, Any] = {"dropout_p": 0.35, "dropout_seed": 2**60 + 9}
    if target.refuses(lambda: target.forward(query, key, value, **opts), opts):
        return
    import flashattn as fa

    for queries in (200, 2**33, 2**62):
        shard = fa.DropoutShard(5, 1, queries, queries - rows, keys, start)
        out, _ = target.forward(query, key, value, dropout_shard=shard, **opts)
        mask = fa.dropout_mask(shape, 0.35, opts["dropout_seed"], dropout_shard=shard)
        np.testing.assert_array_equal(out.transpose(0, 2, 1, 3) != 0, mask != 0)


def _seconds(call: Callable[[], Any]) -> float:
    def once() -> float:
        start = time.process_time()
        call()
        return time.process_time() - start

    return min(once() for _ in range(3))


def test_cost_goes_with_what_is_visible(target: Target) -> None:
    """A narrow window and a mask of few tiles take a fraction of the whole: room for noise, but not
    for the other tiles.
    """
    if target.backend != "cpu":
        return
    problem = build(Case(1, 1, 1, 2048, 2048, 64))
    whole = _seconds(lambda: target.forward(*problem.inputs))
    narrow = _seconds(lambda: target.forward(*problem.inputs, window=(63, 0)))
    assert narrow < whole / 4  # a sixteenth, were it not for the ends
    mask = np.kron(np.eye(16, dtype=bool), np.ones((128, 128), bool))
    if not target.lacks({"mask": mask}):
        few = _seconds(lambda: target.forward(*problem.inputs, mask=mask))
        assert few < whole / 3
