"""The same call gives the same bits: run to run, for every thread count, whatever else is in the
batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Case, build
from targets import Target

CASES = {
    "causal": Case(3, 4, 2, 150, 201, 40, causal=True),
    "full": Case(2, 3, 3, 97, 300, 64),
    "window": Case(2, 4, 1, 200, 200, 24, causal=True, window=(50, -1)),
    "lengths": Case(3, 2, 1, 70, 140, 32, kv_lengths=(140, 3, 77)),
    "decode": Case(3, 8, 2, 1, 1500, 64, causal=True),
    "many_heads": Case(1, 16, 2, 33, 65, 16),
}


@pytest.fixture
def threads(target: Target) -> Iterator[Any]:
    if target.backend == "oracle":
        yield lambda _: None
        return
    import flashattn as fa

    before = fa.get_num_threads()
    yield fa.set_num_threads
    fa.set_num_threads(before)


def _run(target: Target, case: Case, batch: slice = slice(None)) -> dict[str, np.ndarray]:
    """out, lse and the gradients, for the given rows of the batch alone, as raw bits."""
    problem = build(case)
    opts = dict(problem.options)
    if "kv_lengths" in opts:
        opts["kv_lengths"] = opts["kv_lengths"][batch].copy()
    query, key, value, dout = (x[batch] for x in (*problem.inputs, problem.dout))
    out, lse = target.forward(query, key, value, **opts)
    grads = target.backward(dout, query, key, value, out, lse, dlse=problem.dlse[batch], **opts)
    found = {"out": out, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    return {n: np.ascontiguousarray(x).view(np.uint8) for n, x in found.items()}


def _assert_same_bits(
    got: dict[str, np.ndarray], expected: dict[str, np.ndarray], at: Any = slice(None)
) -> None:
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name][at], err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_thread_count(target: Target, threads: Any, name: str, dtype: str) -> None:
    case = replace(CASES[name], dtype=dtype)
    threads(1)
    one = _run(target, case)
    for count in (2, 3, 5):
        threads(count)
        _assert_same_bits(_run(target, case), one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_batch_mates(target: Target, name: str, dtype: str) -> None:
    case = replace(CASES[name], dtype=dtype)
    whole = _run(target, case)
    for b in range(case.batch):
        alone = slice(b, b + 1)
        _assert_same_bits(_run(target, case, alone), whole, alone)


@pytest.mark.parametrize("name", CASES)
def test_run_to_run(target: Target, threads: Any, name: str) -> None:
    threads(3)
    first = _run(target, CASES[name])
    for _ in range(5):
        _assert_same_bits(_run(target, CASES[name]), first)


def test_neighbouring_rows(target: Target) -> None:
    """A row's bits do not depend on the other rows of its tile (no shared running max)."""
    problem = build(Case(1, 1, 1, 64, 200, 32))
    query = problem.query.copy()
    before = target.forward(*problem.inputs)
    query[:, 1::2] *= 50.0
    after = target.forward(query, problem.key, problem.value)
    np.testing.assert_array_equal(after[0][:, ::2], before[0][:, ::2])
    np.testing.assert_array_equal(after[1][..., ::2], before[1][..., ::2])
