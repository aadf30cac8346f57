"""The rules of docs/semantics.md, a test each: the order of operations, and what a row sees.

The numbers in the names are the table's. Rules of gradients and values: test_semantics_values.py;
of the other calls: test_semantics_calls.py, which also checks that no rule is without a test.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import DTYPES
from score_calls import (
    CLOSE,
    all_results,
    assert_same_bits,
    identity,
    normal,
    refuses_wrong_arguments,
    score_arrays,
    softmax,
    visible,
    weights,
)
from targets import Target

SCORES = np.array([[0.5, -1.0, 2.0, 0.25], [1.5, 0.0, -0.5, 3.0]])
NONE, ALL = -np.inf, 0.0


def _expect(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    for got, exact in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, exact, **CLOSE)


def test_s01_scale(target: Target) -> None:
    """head_dim^-1/2 if not given; 0 and negative numbers are numbers."""
    inputs = [normal(n, 1, 5, 1, 16) for n in range(3)]
    for got, expected in zip(
        target.forward(*inputs), target.forward(*inputs, scale=0.25), strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    for scale in (0.0, -2.0, 0.5):
        _expect(weights(target, SCORES, scale=scale), softmax(scale * SCORES))


def test_s02_softcap(target: Target) -> None:
    """cap * tanh(scaled score / cap); 0 is off."""
    capped = 1.5 * np.tanh(2.0 * SCORES / 1.5)
    _expect(weights(target, SCORES, scale=2.0, softcap=1.5), softmax(capped))
    for got, expected in zip(
        weights(target, SCORES, softcap=0.0), weights(target, SCORES), strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    if refuses_wrong_arguments(target):
        for wrong in (-1.0, np.nan):
            with pytest.raises(ValueError, match="softcap"):
                weights(target, SCORES, softcap=wrong)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_s03_alibi(target: Target, shape: tuple[int, ...]) -> None:
    """slope * |pos(i) - j| is subtracted behind softcap, at the same positions with causal."""
    slopes = np.full(shape, 0.5, np.float32)
    distance = np.abs(np.arange(2)[:, None] + 2 - np.arange(4))
    _expect(weights(target, SCORES, alibi_slopes=slopes), softmax(SCORES - 0.5 * distance))
    causal = np.where(np.arange(4) <= np.arange(2)[:, None] + 2, SCORES - 0.5 * distance, NONE)
    _expect(weights(target, SCORES, alibi_slopes=slopes, causal=True), softmax(causal))
    capped = np.tanh(SCORES) - 0.5 * distance
    _expect(weights(target, SCORES, alibi_slopes=slopes, softcap=1.0), softmax(capped))


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_s04_additive_mask(target: Target, dtype: str) -> None:
    """Of any floating dtype and any shape that broadcasts, added behind softcap and ALiBi."""
    values = normal(3, 2, 4).astype(DTYPES.get(dtype, dtype))
    exact = values.astype(np.float32).astype(np.float64)
    _expect(weights(target, SCORES, mask=values), softmax(SCORES + exact))
    _expect(weights(target, SCORES, mask=values, softcap=1.0), softmax(np.tanh(SCORES) + exact))
    for part in (values[:1], values[0], values[:, :1], values[None, None]):
        whole = np.broadcast_to(part, (1, 1, 2, 4)).copy()
        _expect(weights(target, SCORES, mask=part), weights(target, SCORES, mask=whole))


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_s05_exclusion_is_the_intersection(target: Target, kind: str) -> None:
    """Causal, window, mask and lengths: a key is seen by a row if each of them alone shows it."""
    shown = np.random.default_rng(0).random((6, 8)) < 0.8
    each: list[dict[str, Any]] = [
        {"causal": True, "q_offset": 1},
        {"window": (4, 3), "q_offset": 1},
        {"kv_lengths": np.array([6], np.int32), "q_offset": 1},
        {"mask": shown if kind == "bool" else np.where(shown, ALL, NONE).astype(np.float32)},
    ]
    sets = [visible(target, 6, 8, **opts) for opts in each]
    assert all(not one.all() and one.any() for one in sets)
    together: dict[str, Any] = {name: x for opts in each for name, x in opts.items()}
    expected = np.logical_and.reduce(sets)
    assert not any((expected == one).all() for one in sets)
    np.testing.assert_array_equal(visible(target, 6, 8, **together), expected)


def test_s06_sink(target: Target) -> None:
    """One more logit of the denominator: not scaled, not capped, not dropped; lse includes it."""
    for sink in (0.7, 3.0, -200.0, 200.0):
        sinks = np.array([sink], np.float32)
        scores = 0.5 * np.tanh(2.0 * SCORES / 0.5)
        found = weights(target, SCORES, scale=2.0, softcap=0.5, sinks=sinks)
        _expect(found, softmax(scores, float(sinks[0])))
        dropped = {"dropout_p": 0.5, "dropout_seed": 11}
        some, lse = weights(target, SCORES, scale=2.0, softcap=0.5, sinks=sinks, **dropped)
        np.testing.assert_array_equal(lse, found[1])
        np.testing.assert_allclose(some[some != 0], 2 * found[0][some != 0], **CLOSE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_s07_softmax_in_float32(target: Target, dtype: str) -> None:
    """16-bit arrays change nothing about it: lse is that of the scores to float32's precision."""
    query = np.array([[12.0, 11.875], [300.0, 1.0]])[None, :, None, :].astype(DTYPES[dtype])
    key = identity(2).astype(DTYPES[dtype])
    out, lse = target.forward(query, key, key, scale=1.0)
    expected = softmax(query[0, :, 0].astype(np.float64))
    np.testing.assert_allclose(lse[0, 0], expected[1], rtol=3e-7)
    np.testing.assert_array_equal(out[0, 1, 0].astype(np.float64), [1.0, 0.0])


def test_s08_dropout_on_the_probabilities(target: Target) -> None:
    """Weights are 0 or p / (1 - p), and lse does not know of it."""
    opts = {"dropout_p": 0.25, "dropout_seed": 5}
    plain, lse = weights(target, normal(0, 12, 16))
    dropped, same_lse = weights(target, normal(0, 12, 16), **opts)
    keep = target.function("dropout_mask")
    assert keep is not None
    factor = keep((1, 1, 12, 16), 0.25, 5)[0, 0]
    assert 0 < (factor == 0).sum() < factor.size
    np.testing.assert_allclose(dropped, plain * factor, **CLOSE)
    np.testing.assert_allclose(same_lse, lse, **CLOSE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_s09_accumulated_in_float32_rounded_once(target: Target, dtype: str) -> None:
    """Sixteen equal weights: adding or rounding in 16 bits would come out elsewhere."""
    small = float(np.asarray(1.375 * 2.0**-8, DTYPES[dtype]))
    value = np.full((1, 16, 1, 1), small).astype(DTYPES[dtype])
    value[0, 0] = 1.0
    none = np.zeros((1, 1, 1, 16), DTYPES[dtype])
    out, _ = target.forward(none, np.zeros((1, 16, 1, 16), DTYPES[dtype]), value)
    exact = (1.0 + 15 * small) / 16
    assert out.ravel()[0] == np.asarray(exact).astype(DTYPES[dtype])
    stepwise = value.ravel()[0]
    for x in value.ravel()[1:]:
        stepwise = (stepwise + x).astype(DTYPES[dtype])
    if dtype == "bfloat16":
        assert out.ravel()[0] != (stepwise / 16).astype(DTYPES[dtype])


def _means(target: Target, seqlen_q: int, seqlen_k: int, **opts: Any) -> Any:
    """Values 0, 1, 2, ... under equal scores: out is the mean of the numbers of the keys seen."""
    query, key = (np.zeros((1, t, 1, 4), np.float32) for t in (seqlen_q, seqlen_k))
    value = np.arange(seqlen_k, dtype=np.float32)[None, :, None, None]
    out, lse = target.forward(query, key, value, **opts)
    return out.ravel(), lse.ravel()


def test_s10_causal_of_unequal_lengths(target: Target) -> None:
    """True: the last row sees the last key. "top_left": row i sees keys 0 ... i."""
    out, _ = _means(target, 2, 5, causal=True)
    np.testing.assert_allclose(out, [1.5, 2.0], rtol=1e-6)
    out, lse = _means(target, 5, 2, causal=True)
    np.testing.assert_allclose(out, [0, 0, 0, 0, 0.5], rtol=1e-6)
    np.testing.assert_allclose(lse, [NONE, NONE, NONE, 0, np.log(2.0)], rtol=1e-6)
    np.testing.assert_allclose(_means(target, 2, 5, causal="top_left")[0], [0, 0.5], rtol=1e-6)
    expected = [0, 0.5, 0.5, 0.5, 0.5]
    np.testing.assert_allclose(_means(target, 5, 2, causal="top_left")[0], expected, rtol=1e-6)


def test_s11_window(target: Target) -> None:
    """Inclusive distances from pos(i) = i + Tk - Tq; -1 is unlimited; 64 bits."""
    rows = np.arange(3)[:, None] + 2
    keys = np.arange(5)
    for left, right in ((1, 0), (0, 1), (2, 2), (-1, 0), (1, -1), (0, 0)):
        expected = np.ones((3, 5), bool)
        if left >= 0:
            expected &= keys >= rows - left
        if right >= 0:
            expected &= keys <= rows + right
        np.testing.assert_array_equal(visible(target, 3, 5, window=(left, right)), expected)
    for big in (2**31, 2**40, 2**62):
        assert visible(target, 3, 5, window=(big, big)).all()
    # The widest that still exclude something: a right of Tq - 2, a left of Tk - 2.
    np.testing.assert_array_equal(visible(target, 3, 5, window=(-1, 1)), keys <= rows + 1)
    np.testing.assert_array_equal(visible(target, 3, 5, window=(3, -1)), keys >= rows - 3)
    assert visible(target, 3, 5, window=(4, 2)).all()
    if refuses_wrong_arguments(target):
        for wrong in ((-2, 0), (0, -2), (1.5, 0), ("1", 0)):
            with pytest.raises(ValueError, match="window"):
                visible(target, 3, 5, window=wrong)


def test_s12_offsets(target: Target) -> None:
    """Rows stand at i + q_offset, keys at j + k_offset: for causal, windows and ALiBi, and with a
    shard that says the same, dropout.
    """
    rows, keys = np.arange(2)[:, None] + 3, np.arange(4) + 2
    at: dict[str, Any] = {"q_offset": 3, "k_offset": 2}
    np.testing.assert_array_equal(visible(target, 2, 4, causal=True, **at), keys <= rows)
    expected = (keys >= rows - 1) & (keys <= rows)
    np.testing.assert_array_equal(visible(target, 2, 4, window=(1, 0), **at), expected)
    slopes = np.full(1, 0.5, np.float32)
    found = weights(target, SCORES, alibi_slopes=slopes, **at)
    _expect(found, softmax(SCORES - 0.5 * np.abs(rows - keys)))
    scores = normal(1, 8, 12)
    drop: dict[str, Any] = {"dropout_p": 0.5, "dropout_seed": 3, "causal": "top_left"}
    whole, _ = weights(target, scores, **drop)
    shard = _shard(target, 1, 0, 8, 5, 12, 0)
    part, _ = weights(target, scores[5:], q_offset=5, dropout_shard=shard, **drop)
    np.testing.assert_array_equal(part, whole[5:])


def _shard(target: Target, *numbers: int) -> Any:
    if target.backend == "oracle":
        import philox

        return philox.DropoutShard(*numbers)
    import flashattn as fa

    return fa.DropoutShard(*numbers)


def test_s13_bool_mask_true_attends(target: Target) -> None:
    mask = np.array([[True, False, True, False], [False, False, False, True]])
    np.testing.assert_array_equal(visible(target, 2, 4, mask=mask), mask)
    _expect(weights(target, SCORES, mask=mask), softmax(np.where(mask, SCORES, NONE)))


def test_s14_minus_infinity_is_false_and_every_finite_value_is_a_value(target: Target) -> None:
    mask = np.array([[True, False, True, False], [False, False, False, True]])
    additive = np.where(mask, ALL, NONE).astype(np.float32)
    inputs, dout = score_arrays(SCORES), normal(4, 1, 2, 1, 4)
    one = all_results(target, dout, *inputs, mask=additive)
    dmask = one.pop("dmask")
    assert_same_bits(one, all_results(target, dout, *inputs, mask=mask))
    assert (dmask[~mask] == 0).all()
    lowest = np.full((2, 4), np.finfo(np.float32).min)
    out, lse = weights(target, SCORES, mask=lowest)
    np.testing.assert_allclose(out, np.full((2, 4), 0.25), rtol=1e-6)
    assert np.isfinite(lse).all()
    lowest[0, 0] = 0.0
    np.testing.assert_array_equal(weights(target, SCORES, mask=lowest)[0][0], [1, 0, 0, 0])


@pytest.mark.parametrize("why", ["causal", "window", "bool", "additive", "lengths"])
def test_s15_rows_without_a_key(target: Target, why: str) -> None:
    """out 0, lse -inf (or the sink), and exactly 0 to every gradient."""
    hidden = np.zeros((3, 4), bool)
    opts: dict[str, Any] = {
        "causal": {"causal": True, "q_offset": -9},
        "window": {"window": (0, 0), "q_offset": 20},
        "bool": {"mask": hidden},
        "additive": {"mask": np.where(hidden, ALL, NONE).astype(np.float32)},
        "lengths": {"kv_lengths": np.array([0], np.int32)},
    }[why]
    inputs, dout, dlse = score_arrays(normal(1, 3, 4)), normal(2, 1, 3, 1, 4), normal(3, 1, 1, 3)
    found = all_results(target, dout, *inputs, dlse=dlse, **opts)
    assert np.isneginf(found.pop("lse")).all()
    for name, result in found.items():
        assert (result == 0).all(), name
    sinks = np.array([0.75], np.float32)
    found = all_results(target, dout, *inputs, dlse=dlse, sinks=sinks, **opts)
    assert (found.pop("lse") == 0.75).all()
    np.testing.assert_allclose(found.pop("dsinks"), [dlse.sum()], rtol=1e-6)
    for name, result in found.items():
        assert (result == 0).all(), name


def test_s16_empty_axes(target: Target) -> None:
    """No keys: rows without a key. No rows or no batch: nothing. No dimensions: an error."""
    query, none = np.ones((2, 3, 2, 4), np.float32), np.ones((2, 0, 2, 4), np.float32)
    found = all_results(target, query, query, none, none)
    assert (found["out"] == 0).all()
    assert np.isneginf(found["lse"]).all()
    assert (found["dq"] == 0).all()
    assert found["dk"].shape == (2, 0, 2, 4)
    for shape, keys in (((2, 0, 2, 4), (2, 5, 2, 4)), ((0, 3, 2, 4), (0, 5, 2, 4))):
        rows, key = np.ones(shape, np.float32), np.ones(keys, np.float32)
        found = all_results(target, rows, rows, key, key)
        assert found["out"].shape == shape
        assert found["lse"].shape == (shape[0], 2, shape[1])
        assert (found["dk"] == 0).all()
    if refuses_wrong_arguments(target):
        flat = np.ones((1, 2, 1, 0), np.float32)
        with pytest.raises(ValueError, match="head_dim"):
            target.forward(flat, flat, np.ones((1, 2, 1, 4), np.float32))


BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
EXCLUDED: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "q_offset": 3},
    "window": {"window": (2, 2), "q_offset": 1},
    "lengths": {"kv_lengths": np.array([5], np.int32)},
    "bool": {"mask": np.arange(6) != 5},
    "additive": {"mask": np.where(np.arange(6) != 5, 0.5, NONE).astype(np.float32)},
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("why", EXCLUDED)
def test_s17_what_is_excluded_may_hold_anything(target: Target, why: str, bad: str) -> None:
    """Key 5 is seen by no row: its content reaches no result and no gradient."""
    query, key, value, dout = (normal(n, 1, t, 1, 8) for n, t in enumerate((2, 6, 6, 2)))
    clean = all_results(target, dout, query, key, value, **EXCLUDED[why])
    key[:, 5] = value[:, 5] = BAD[bad]
    dirty = all_results(target, dout, query, key, value, **EXCLUDED[why])
    assert_same_bits(dirty, clean)
    assert (dirty["dk"][:, 5] == 0).all()
    assert (dirty["dv"][:, 5] == 0).all()


def test_s18_what_is_visible_is_seen(target: Target) -> None:
    """NaN in key 2 under causal: rows 2 ... 5 are NaN, rows 0 and 1 keep their bits."""
    arrays = [normal(n, 1, 6, 1, 8) for n in range(4)]
    clean = all_results(target, arrays[3], *arrays[:3], causal=True)
    arrays[1][0, 2, 0, 0] = np.nan
    dirty = all_results(target, arrays[3], *arrays[:3], causal=True)
    for name in ("out", "dq"):
        np.testing.assert_array_equal(dirty[name][:, :2], clean[name][:, :2])
        assert np.isnan(dirty[name][:, 2:]).all(axis=-1).all(), name
    assert np.isnan(dirty["lse"][..., 2:]).all()


def test_s19_scores_of_minus_infinity_have_no_weight(target: Target) -> None:
    key = np.array([[0.5, -np.inf, 1.0, -np.inf]], np.float32).reshape(1, 4, 1, 1)
    out, lse = target.forward(np.ones((1, 1, 1, 1), np.float32), key, identity(4), scale=1.0)
    expected = softmax([0.5, NONE, 1.0, NONE])
    _expect((out.ravel(), lse.ravel()), (expected[0], expected[1].reshape(1)))


def test_s20_query_head_h_uses_kv_head_h_divided_by_the_group(target: Target) -> None:
    query, key = normal(0, 1, 2, 6, 4), normal(1, 1, 1, 3, 4)
    value = np.arange(3, dtype=np.float32).reshape(1, 1, 3, 1)
    out, _ = target.forward(query, key, value)
    np.testing.assert_array_equal(out[0, 0, :, 0], [0, 0, 1, 1, 2, 2])
    if refuses_wrong_arguments(target):
        with pytest.raises(ValueError, match="heads"):
            target.forward(query[:, :, :5], key, value)
