"""Calls whose scores are given outright, so that a rule can be read off their results.

With key = identity and scale 1 a query row is its own row of scores, and with value = identity out
is the matrix of weights. Sizes stay at 16 dimensions and below: one size of kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from targets import Target

# Two float32 evaluations of numbers of order one: 16 ulp of 1, docs/tolerances.md.
CLOSE = {"rtol": 2e-6, "atol": 2e-6}
GRADIENTS_CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def refuses_wrong_arguments(target: Target) -> bool:
    """The oracle computes and checks nothing."""
    return target.backend != "oracle"


def normal(seed: int, *shape: int) -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def identity(size: int) -> NDArray[np.float32]:
    """(1, size, 1, size)."""
    return np.eye(size, dtype=np.float32)[None, :, None, :].copy()


def score_arrays(scores: ArrayLike) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """query, key, value of one head whose scores at scale 1 are `scores` (Tq, Tk)."""
    rows = np.asarray(scores, np.float32)
    return rows[None, :, None, :].copy(), identity(rows.shape[1]), identity(rows.shape[1])


def weights(target: Target, scores: ArrayLike, **opts: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """What each row gives each key, (Tq, Tk), and lse, (Tq,)."""
    out, lse = target.forward(*score_arrays(scores), **{"scale": 1.0, **opts})
    return out[0, :, 0], lse[0, 0]


def softmax(
    scores: ArrayLike, sink: float = -np.inf
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The same two in float64; -inf excludes, and `sink` is one more logit without a value."""
    s = np.asarray(scores, np.float64)
    with np.errstate(divide="ignore"):
        top = np.maximum(s.max(axis=-1, keepdims=True), sink)
        top = np.where(np.isneginf(top), 0.0, top)
        exponentials = np.exp(s - top)
        total = exponentials.sum(axis=-1, keepdims=True) + np.exp(sink - top)
        lse = (top + np.log(total))[..., 0]
    return np.where(total == 0, 0.0, exponentials / np.where(total == 0, 1.0, total)), lse


def visible(target: Target, seqlen_q: int, seqlen_k: int, **opts: Any) -> NDArray[np.bool_]:
    """Which keys have any weight where all scores are 0: (Tq, Tk)."""
    seen: NDArray[np.bool_] = weights(target, np.zeros((seqlen_q, seqlen_k)), **opts)[0] != 0
    return seen


def all_results(target: Target, dout: Any, *inputs: Any, **opts: Any) -> dict[str, Any]:
    """out, lse and every gradient that there is."""
    dlse = opts.pop("dlse", None)
    out, lse = target.forward(*inputs, **opts)
    grads = target.backward(dout, *inputs, out, lse, dlse=dlse, **opts)
    names = ("dq", "dk", "dv", "dmask", "dalibi_slopes", "dsinks")
    found = {name: getattr(grads, name) for name in names}
    return {"out": out, "lse": lse} | {n: x for n, x in found.items() if x is not None}


def assert_same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, expected in other.items():
        np.testing.assert_array_equal(one[name], expected, err_msg=name)
