"""Gradients of rows whose lse is so large that float32 rounds away what the weights need of it.

lse = max + log(sum): at |lse| = 10^3 a float32 is off by 3e-5, and with it every weight exp(s-lse)
of the row; at float32's least value log(sum) is lost whole. The yardstick here is the chain rule
alone, whose weights sum to 1: weights from a stored lse are what these tests are about.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
from cases import Case, Problem, build
from naive import Naive
from targets import Target
from tolerance import GRADIENT_FACTOR, assert_close
from yardstick import GRADIENTS, copies

FEW, MANY = 5, 70  # rows: of the decode kernel, and of the lane kernel
LEAST = float(np.finfo(np.float32).min)


def _gradients(target: Target, problem: Problem, opts: dict[str, Any]) -> Any:
    out, lse = target.forward(*problem.inputs, **opts)
    return target.backward(problem.dout, *problem.inputs, out, lse, dlse=problem.dlse, **opts)


def _distance_of_chain_rule(problem: Problem) -> dict[str, float]:
    """The largest of problems like this one, as yardstick.py measures."""
    found: dict[str, float] = {}
    for dout, *copy in copies((problem.dout, *problem.inputs)):
        naive = Naive(*copy, **problem.options).backward(dout, problem.dlse)
        oracle = reference.attention_backward(dout, *copy, problem.dlse, **problem.options)
        for name in GRADIENTS:
            exact = getattr(oracle, name)
            if exact is not None:
                distance = float(np.abs(getattr(naive, name) - exact).max())
                found[name] = max(found.get(name, 0.0), distance)
    return found


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("least", [LEAST, -1e30])
def test_rows_of_the_lowest_finite_values(
    target: Target, least: float, rows: int, sinks: bool
) -> None:
    """Their forward is the mean of the values, so what comes back is dout / n."""
    if target.backend != "cpu":
        pytest.skip("the cpu backend's alone")
    problem = build(Case(2, 4, 2, rows, 130, 16, seed=3))
    opts: dict[str, Any] = {"mask": np.full((rows, 130), least, np.float32)}
    if sinks:
        opts["sinks"] = np.full(4, least, np.float32)
    grads = _gradients(target, problem, opts)
    count = 131 if sinks else 130
    of_group = problem.dout.astype(np.float64).reshape(2, rows, 2, 2, 16).sum(axis=(1, 3)) / count
    expected = np.broadcast_to(of_group[:, None], grads.dv.shape)
    np.testing.assert_allclose(grads.dv, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads.dmask.sum(axis=1), _ds_of_rows(problem, count), atol=2e-4)
    if sinks:
        mean = np.repeat(problem.value.astype(np.float64).sum(axis=1) / count, 2, axis=1)
        delta = (problem.dout * mean[:, None]).sum(axis=3).transpose(0, 2, 1) - problem.dlse
        np.testing.assert_allclose(grads.dsinks, -delta.sum(axis=(0, 2)) / count, atol=1e-5)


def _ds_of_rows(problem: Problem, count: int) -> np.ndarray:
    """Sums of dS over batch entries, heads and keys where every weight is 1 / count."""
    keys = problem.value.shape[1]
    value = np.repeat(problem.value.astype(np.float64).sum(axis=1), 2, axis=1)  # (B, H, Dv)
    dp = (problem.dout * value[:, None]).sum(axis=3).transpose(0, 2, 1)  # over keys
    return ((dp - keys * (dp / count - problem.dlse)) / count).sum(axis=(0, 1))


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("modified", [False, True])
@pytest.mark.parametrize("scale", [100.0, -1000.0])
def test_large_scales(target: Target, scale: float, modified: bool, rows: int) -> None:
    if target.backend != "cpu":
        pytest.skip("the cpu backend's alone")
    case = Case(1, 4, 2, rows, 200, 16, scale=scale, causal=True)
    if modified:
        case = Case(1, 4, 2, rows, 200, 16, scale=scale, mask="additive", alibi="head", sinks=True)
    problem = build(case)
    grads = _gradients(target, problem, problem.options)
    for name, distance in _distance_of_chain_rule(problem).items():
        expected = getattr(problem.oracle_gradients, name)
        got = getattr(grads, name)
        assert_close(got, expected, distance, factor=GRADIENT_FACTOR, name=name)


@pytest.mark.parametrize("mask", [None, "additive"])
def test_lse_of_more_keys_than_the_call_has(target: Target, mask: str | None) -> None:
    """A ring's part takes the whole's out and lse; its weights sum to less than 1 and stay so."""
    problem = build(Case(1, 2, 2, 70, 128, 16, scale=40.0, mask=mask))
    key, value = (np.concatenate([x[:, :64], x[:, :64]], 1) for x in (problem.key, problem.value))
    opts = dict(problem.options)
    if mask is not None:
        opts["mask"] = np.concatenate([opts["mask"][..., :64]] * 2, -1)
    query, dout = problem.query, problem.dout
    out, lse = target.forward(query, key, value, **opts)
    assert np.abs(lse).min() > 64 or mask
    whole = target.backward(dout, query, key, value, out, lse, **opts)
    if mask is not None:
        opts["mask"] = opts["mask"][..., :64]
    part = target.backward(dout, query, key[:, :64], value[:, :64], out, lse, **opts)
    for name in ("dk", "dv"):
        got, expected = getattr(part, name), getattr(whole, name)[:, :64]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_bits_do_not_depend_on_batch_mates(target: Target) -> None:
    problem = build(Case(3, 4, 2, 70, 130, 16, scale=100.0, causal=True))
    opts = problem.options
    whole = _gradients(target, problem, opts)
    for b in range(3):
        one = tuple(x[b : b + 1] for x in problem.inputs)
        out, lse = target.forward(*one, **opts)
        dout, dlse = problem.dout[b : b + 1], problem.dlse[b : b + 1]
        grads = target.backward(dout, *one, out, lse, dlse=dlse, **opts)
        for name in ("dq", "dk", "dv"):
            np.testing.assert_array_equal(getattr(grads, name)[0], getattr(whole, name)[b])
