"""NaN and Inf under masks: an excluded pair leaks nothing, whatever shape the visible set has.

Most tests use two strangers: even rows see even keys and odd rows odd keys, so that no tile is
free of excluded pairs and no interval describes what a row sees. What happens to the even ones must
not move a bit of the odd ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import DTYPES, GRADIENTS, Case, build
from targets import Target

BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
MASKS = ["bool", "additive"]
# Everything that may stand beside a mask.
BESIDE = {
    "alone": {},
    "causal": {"causal": True, "window": (70, -1)},
    "softcap": {"softcap": 2.0},
    "alibi_dropout": {"alibi": "head", "dropout_p": 0.3},
}
SIZES = Case(1, 2, 1, 140, 150, 20, 24)


def _strangers(case: Case, kind: str) -> np.ndarray:
    rows, keys = np.arange(case.seqlen_q)[:, None], np.arange(case.seqlen_k)[None, :]
    same = rows % 2 == keys % 2
    if kind == "bool":
        return same[None, None]
    values = np.random.default_rng(4).standard_normal((1, 1, *same.shape)).astype(np.float32)
    return np.where(same, values, np.float32(-np.inf))


def _all(target: Target, arrays: dict[str, np.ndarray], opts: dict[str, Any]) -> dict[str, Any]:
    query, key, value = (arrays[n] for n in ("query", "key", "value"))
    out, lse = target.forward(query, key, value, **opts)
    grads = target.backward(
        arrays["dout"], query, key, value, out, lse, dlse=arrays["dlse"], **opts
    )
    found = {"out": out, "lse": lse, **{n: getattr(grads, n) for n in GRADIENTS}}
    return {n: np.asarray(x) for n, x in found.items() if x is not None}


def _setup(case: Case, kind: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    problem = build(case)
    arrays = {n: getattr(problem, n).copy() for n in ("query", "key", "value", "dout", "dlse")}
    return arrays, {**problem.options, "mask": _strangers(case, kind)}


def _odd(results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What belongs to odd rows and odd keys."""
    axis = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1, "dmask": 2}
    return {
        n: results[n].take(range(1, results[n].shape[a], 2), a)
        for n, a in axis.items()
        if n in results
    }


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", BAD)
def test_strangers_do_not_meet(
    target: Target, bad: str, dtype: str, kind: str, beside: str
) -> None:
    """A bad even query, key, value or dout row: odd rows and keys keep every bit."""
    case = replace(SIZES, dtype=dtype, **BESIDE[beside])
    arrays, opts = _setup(case, kind)
    if target.refuses(lambda: _all(target, arrays, opts), opts):
        return
    clean = _odd(_all(target, arrays, opts))
    for name, at in (("query", 70), ("key", 66), ("value", 128), ("dout", 100)):
        dirty = {n: x.copy() for n, x in arrays.items()}
        dirty[name][:, at, :, 3] = BAD[bad]
        results = _all(target, dirty, opts)
        moved = "out" if name in ("query", "value") else "dq"
        if bad == "nan" and name != "key":
            assert np.isnan(results[moved].astype(np.float32)).any(), name
        for what, got in _odd(results).items():
            np.testing.assert_array_equal(got, clean[what], err_msg=f"{name}: {what}")


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("bad", BAD)
def test_bad_everything_behind_a_mask(target: Target, bad: str, kind: str) -> None:
    """Keys that the mask hides from every row may hold anything: results keep their bits."""
    case = Case(2, 4, 2, 40, 140, 24)
    arrays, opts = _setup(case, kind)
    hidden = np.random.default_rng(1).random(case.seqlen_k) < 0.5
    closed = False if kind == "bool" else np.float32(-np.inf)
    opts["mask"] = np.where(hidden, closed, opts["mask"][:, :, :1])
    if target.refuses(lambda: _all(target, arrays, opts), opts):
        return
    clean = _all(target, arrays, opts)
    arrays["key"][:, hidden] = arrays["value"][:, hidden] = BAD[bad]
    for what, got in _all(target, arrays, opts).items():
        np.testing.assert_array_equal(got, clean[what], err_msg=what)
        if what in ("dk", "dv"):
            assert (got[:, hidden] == 0).all()


@pytest.mark.parametrize("bad", BAD)
def test_bad_mask_values_where_causal_excludes(target: Target, bad: str) -> None:
    """Elements of the mask that no row can see leave no trace, and their gradient is 0."""
    case = Case(1, 2, 1, 100, 100, 16, causal=True)
    arrays, opts = _setup(case, "additive")
    opts["mask"] = np.random.default_rng(2).standard_normal((1, 1, 100, 100)).astype(np.float32)
    if target.refuses(lambda: _all(target, arrays, opts), opts):
        return
    clean = _all(target, arrays, opts)
    future = np.triu(np.ones((100, 100), bool), 1)
    opts["mask"] = np.where(future, np.float32(BAD[bad]), opts["mask"])
    dirty = _all(target, arrays, opts)
    for what, got in dirty.items():
        np.testing.assert_array_equal(got, clean[what], err_msg=what)
    assert (dirty["dmask"][0, 0][future] == 0).all()


def test_nan_mask_value_reaches_its_row(target: Target) -> None:
    case = Case(1, 2, 2, 40, 90, 16)
    arrays, opts = _setup(case, "additive")
    opts["mask"] = np.zeros((1, 2, 40, 90), np.float32)
    if target.refuses(lambda: _all(target, arrays, opts), opts):
        return
    clean = _all(target, arrays, opts)
    opts["mask"][0, 1, 11, 70] = np.nan
    dirty = _all(target, arrays, opts)
    for what, axes in (("out", (0, 3)), ("dq", (0, 3)), ("dmask", (0, 3))):
        rows = np.isnan(dirty[what]).any(axis=axes)
        expected = np.zeros((2, 40), bool)
        expected[1, 11] = True
        np.testing.assert_array_equal(rows if what == "dmask" else rows.T, expected, err_msg=what)
    for what in ("dk", "dv"):
        assert np.isnan(dirty[what][:, :, 1]).all()
        np.testing.assert_array_equal(dirty[what][:, :, 0], clean[what][:, :, 0])


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_are_masked_whole(target: Target, sinks: bool, kind: str) -> None:
    """Whatever query and dout hold there: out 0, no gradient; with a sink LSE = sink, weight 1."""
    case = Case(2, 2, 1, 70, 80, 16, alibi="head", sinks=sinks)
    arrays, opts = _setup(case, kind)
    dead = np.arange(70) % 3 == 0
    closed = False if kind == "bool" else np.float32(-np.inf)
    full = np.random.default_rng(3).standard_normal((2, 2, 70, 80)).astype(np.float32)
    opts["mask"] = np.where(dead[:, None], closed, full > -5 if kind == "bool" else full)
    arrays["query"][:, dead] = arrays["dout"][:, dead] = np.nan
    if not sinks:
        arrays["dlse"][..., dead] = np.nan
    if target.refuses(lambda: _all(target, arrays, opts), opts):
        return
    found = _all(target, arrays, opts)
    for what in ("out", "dq"):
        assert (found[what][:, dead] == 0).all(), what
    for what in GRADIENTS:
        assert what not in found or np.isfinite(found[what]).all(), what
    if kind == "additive":
        assert (found["dmask"][:, :, dead] == 0).all()
    if not sinks:
        assert np.isneginf(found["lse"][..., dead]).all()
        return
    expected = np.broadcast_to(opts["sinks"][:, None], (2, 2, int(dead.sum())))
    np.testing.assert_array_equal(found["lse"][..., dead], expected)
    # The dead rows' share of dsinks is sum dlse: their weight is the sink's alone.
    arrays["dlse"][..., dead] = 0.0
    without = _all(target, arrays, opts)["dsinks"]
    moved = build(case).dlse[..., dead].astype(np.float64).sum(axis=(0, 2))
    np.testing.assert_allclose(found["dsinks"] - without, moved, atol=1e-4)
