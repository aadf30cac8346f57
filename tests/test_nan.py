"""NaN and Inf: never out of an excluded position, always out of a visible one, and only into the
rows that see it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import DTYPES, Case, build
from targets import Target

BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def _all(
    target: Target, arrays: dict[str, np.ndarray], dlse: np.ndarray, opts: dict[str, Any]
) -> dict[str, Any]:
    query, key, value = (arrays[n] for n in ("query", "key", "value"))
    out, lse = target.forward(query, key, value, **opts)
    grads = target.backward(arrays["dout"], query, key, value, out, lse, dlse=dlse, **opts)
    return {"out": out, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


def _arrays(case: Case) -> dict[str, np.ndarray]:
    problem = build(case)
    return {n: getattr(problem, n).copy() for n in ("query", "key", "value", "dout")}


def _nan(x: Any) -> np.ndarray:
    return np.isnan(np.asarray(x).astype(np.float32))


# Each leaves some keys unseen by every row: their content may be anything at all.
UNSEEN = {
    "lengths": {"kv_lengths": (37, 70, 0), "causal": True},
    "lengths_not_causal": {"kv_lengths": (64, 1, 69)},
    "top_left": {"causal": "top_left"},
    "window": {"window": (3, 2)},
    "offset": {"q_offset": 5, "causal": True},
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNSEEN)
def test_keys_that_no_row_sees(target: Target, name: str, dtype: str, bad: str) -> None:
    """Stale cache rows and padding: results keep their bits, the gradients of such keys are 0."""
    case = Case(3, 4, 2, 20, 70, 24, 40, dtype=dtype, **UNSEEN[name])
    problem, arrays = build(case), _arrays(case)
    clean = _all(target, arrays, problem.dlse, problem.options)
    seen = problem.oracle.visible.any(axis=(1, 2))  # (B, Tk)
    assert not seen.all()
    arrays["key"][~seen] = arrays["value"][~seen] = BAD[bad]
    dirty = _all(target, arrays, problem.dlse, problem.options)
    for what in clean:
        np.testing.assert_array_equal(dirty[what], clean[what], err_msg=what)
    for what in ("dk", "dv"):
        assert (np.asarray(dirty[what])[~seen].astype(np.float32) == 0).all()


@pytest.mark.parametrize("where", ["key", "value", "both"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", BAD)
def test_key_seen_by_some_rows(target: Target, bad: str, dtype: str, where: str) -> None:
    """Causal: rows before a bad key keep their bits in out, lse and dq."""
    case = Case(1, 2, 1, 100, 100, 20, dtype=dtype, causal=True)
    problem = build(case)
    clean = _all(target, _arrays(case), problem.dlse, problem.options)
    for at in (1, 17, 63, 64, 99):
        arrays = _arrays(case)
        for name in ("key", "value"):
            if where in (name, "both"):
                arrays[name][:, at, :, 3] = BAD[bad]
        dirty = _all(target, arrays, problem.dlse, problem.options)
        np.testing.assert_array_equal(dirty["out"][:, :at], clean["out"][:, :at])
        np.testing.assert_array_equal(dirty["lse"][..., :at], clean["lse"][..., :at])
        np.testing.assert_array_equal(dirty["dq"][:, :at], clean["dq"][:, :at])
        if bad == "nan":
            rows = _nan(dirty["out"][:, at:])
            assert (rows.any(axis=-1) if where == "value" else rows).all()
            assert _nan(dirty["lse"][..., at:]).all() == (where != "value")


@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_query_row(target: Target, dtype: str) -> None:
    """NaN in a query row: that row alone, and the dk, dv of exactly the keys it sees."""
    case = Case(1, 2, 2, 40, 90, 16, dtype=dtype, causal="top_left")
    problem = build(case)
    clean = _all(target, _arrays(case), problem.dlse, problem.options)
    arrays = _arrays(case)
    arrays["query"][:, 11, 0, 2] = np.nan
    dirty = _all(target, arrays, problem.dlse, problem.options)
    for what in ("out", "dq"):
        expected = np.zeros(dirty[what].shape[:3], bool)
        expected[:, 11, 0] = True
        np.testing.assert_array_equal(_nan(dirty[what]).any(-1), expected, err_msg=what)
        np.testing.assert_array_equal(dirty[what][~expected], clean[what][~expected])
    for what in ("dk", "dv"):
        expected = np.zeros(dirty[what].shape[:3], bool)
        expected[:, :12, 0] = True
        np.testing.assert_array_equal(_nan(dirty[what]).any(-1), expected, err_msg=what)
        np.testing.assert_array_equal(dirty[what][~expected], clean[what][~expected])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_dout_row(target: Target, dtype: str, bad: str) -> None:
    """A bad dout row reaches its own dq and the keys it sees, no other key of the tile."""
    case = Case(1, 2, 2, 40, 90, 16, dtype=dtype, causal="top_left")
    problem = build(case)
    clean = _all(target, _arrays(case), problem.dlse, problem.options)
    arrays = _arrays(case)
    arrays["dout"][:, 11, 0, 2] = BAD[bad]
    dirty = _all(target, arrays, problem.dlse, problem.options)
    np.testing.assert_array_equal(
        np.delete(dirty["dq"], 11, axis=1), np.delete(clean["dq"], 11, axis=1)
    )
    for what in ("dk", "dv"):
        assert not np.isfinite(dirty[what][:, :12, 0].astype(np.float32)).all()
        np.testing.assert_array_equal(dirty[what][:, 12:], clean[what][:, 12:], err_msg=what)
        np.testing.assert_array_equal(dirty[what][:, :, 1], clean[what][:, :, 1], err_msg=what)


def test_key_of_minus_infinity_has_weight_zero(target: Target) -> None:
    """s = -inf out of the data is weight 0, as long as the row has a finite score."""
    problem = build(Case(1, 1, 1, 5, 9, 4))
    query = np.abs(problem.query)
    key = problem.key.copy()
    key[:, 4] = -np.inf
    out, lse = target.forward(query, key, problem.value)
    kept = [j for j in range(9) if j != 4]
    expected = target.forward(query, problem.key[:, kept], problem.value[:, kept])
    np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-6)


@pytest.mark.parametrize("seqlen_q", [1, 16, 17, 40])
def test_row_whose_scores_are_all_minus_infinity_is_dead(target: Target, seqlen_q: int) -> None:
    """As an additive mask of -inf on every key: 0, -inf, and gradients of exactly 0; on decode and
    lane kernels alike.
    """
    problem = build(Case(1, 1, 1, seqlen_q, 70, 4))
    arrays = {
        "query": np.abs(problem.query),
        "key": np.full_like(problem.key, -np.inf),
        "value": problem.value,
        "dout": problem.dout,
    }
    results = _all(target, arrays, problem.dlse, problem.options)
    assert (results["lse"] == -np.inf).all()
    for what in ("out", "dq", "dk", "dv"):
        assert (results[what].astype(np.float32) == 0).all(), what


@pytest.mark.parametrize("keys", [1, 2, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing_read_no_earlier_call(target: Target, dtype: str, keys: int) -> None:
    """A window wholly past the last key, whose place in a tile is not the first: nothing is packed,
    and what an earlier call left in the same memory is not read.
    """
    spoiled = build(Case(1, 1, 1, 20, 64, 64, dtype=dtype))
    problem = build(Case(1, 1, 1, 20, keys, 64, dtype=dtype, window=(0, 0), q_offset=100))
    opts = {**problem.options, "sinks": np.array([0.5], np.float32)}
    if target.refuses(lambda: target.forward(*problem.inputs, **opts), opts):
        return
    target.forward(spoiled.query, np.full_like(spoiled.key, np.nan), spoiled.value, **opts)
    target.forward(spoiled.query, np.full_like(spoiled.key, np.nan), spoiled.value)
    out, lse = target.forward(*problem.inputs, **opts)
    assert (out.astype(np.float32) == 0).all()
    assert (lse == np.float32(0.5)).all()


def test_decode_kernel_keeps_nan_to_its_row(target: Target) -> None:
    """Few rows, many keys: the bad key's batch entry and kv head alone are hit."""
    problem = build(Case(2, 4, 2, 1, 500, 32))
    value = problem.value.copy()
    value[0, 300, 1, 5] = np.nan
    out, _ = target.forward(problem.query, problem.key, value)
    expected = np.zeros(out.shape, bool)
    expected[0, :, 2:, 5] = True
    np.testing.assert_array_equal(np.isnan(out), expected)
