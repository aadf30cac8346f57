"""The same call gives the same bits: run to run, for every thread count, whatever else is in the
batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import GRADIENTS, Case, Problem, build
from targets import Target

CASES = {
    "causal": Case(3, 4, 2, 150, 201, 40, causal=True),
    "full": Case(2, 3, 3, 97, 300, 64),
    "window": Case(2, 4, 1, 200, 200, 24, causal=True, window=(50, -1)),
    "lengths": Case(3, 2, 1, 70, 140, 32, kv_lengths=(140, 3, 77)),
    "decode": Case(3, 8, 2, 1, 1500, 64, causal=True),
    "many_heads": Case(1, 16, 2, 33, 65, 16),
}
# Score modifiers, alone and together. Sizes such that a batch entry's dropout numbers start at a
# multiple of four, because an entry alone is then a call with a dropout_offset.
MODIFIED = {
    "bool": Case(2, 4, 2, 150, 201, 40, mask="bool"),
    "holes": Case(2, 4, 2, 150, 201, 40, mask="holes", causal=True),
    "keys": Case(3, 2, 1, 70, 300, 24, mask="additive_keys"),
    "softcap": Case(2, 4, 2, 97, 300, 64, softcap=3.0),
    "alibi": Case(2, 4, 2, 130, 140, 32, alibi="batch", causal=True),
    "alibi_of_heads": Case(2, 4, 1, 130, 140, 32, alibi="head"),
    "sinks": Case(3, 2, 1, 140, 33, 32, sinks=True, kv_lengths=(33, 0, 7)),
    "dropout": Case(2, 4, 2, 150, 202, 40, dropout_p=0.3),
    "dropout_unaligned": Case(2, 4, 2, 150, 201, 40, dropout_p=0.3),
    "decode": Case(2, 8, 2, 1, 1500, 64, mask="bool_keys", softcap=5.0, alibi="batch", sinks=True),
    "all": Case(
        *(2, 4, 2, 150, 201, 40),
        mask="holes",
        softcap=4.0,
        alibi="batch",
        sinks=True,
        dropout_p=0.2,
        window=(90, 20),
    ),
}
ALL_CASES = {**CASES, **{f"modified_{name}": case for name, case in MODIFIED.items()}}
# Gradients that are sums over the batch: not those of one entry.
OF_ALL_ENTRIES = {
    "modified_keys": {"dmask"},
    "modified_alibi_of_heads": {"dalibi_slopes"},
    "modified_sinks": {"dsinks"},
    "modified_decode": {"dsinks"},
    "modified_all": {"dsinks"},
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
    opts = _options_of(problem, batch)
    query, key, value, dout = (x[batch] for x in (*problem.inputs, problem.dout))
    if target.refuses(lambda: target.forward(query, key, value, **opts), opts):
        return {}
    out, lse = target.forward(query, key, value, **opts)
    grads = target.backward(dout, query, key, value, out, lse, dlse=problem.dlse[batch], **opts)
    found = {"out": out, "lse": lse, **{n: getattr(grads, n) for n in GRADIENTS}}
    return {n: np.ascontiguousarray(x).view(np.uint8) for n, x in found.items() if x is not None}


def _options_of(problem: Problem, batch: slice) -> dict[str, Any]:
    """The problem's options for the given rows of the batch alone."""
    opts = dict(problem.options)
    case = problem.case
    if "kv_lengths" in opts:
        opts["kv_lengths"] = opts["kv_lengths"][batch].copy()
    if "mask" in opts and opts["mask"].shape[0] == case.batch:
        opts["mask"] = opts["mask"][batch].copy()
    if case.alibi == "batch":
        opts["alibi_slopes"] = opts["alibi_slopes"][batch].copy()
    if case.dropout_p and batch.start:
        numbers = batch.start * case.heads * case.seqlen_q * case.seqlen_k
        assert numbers % 4 == 0
        opts["dropout_offset"] = numbers // 4
    return opts


def _assert_same_bits(
    got: dict[str, np.ndarray], expected: dict[str, np.ndarray], at: Any = slice(None)
) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name][at], err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ALL_CASES)
def test_thread_count(target: Target, threads: Any, name: str, dtype: str) -> None:
    case = replace(ALL_CASES[name], dtype=dtype)
    threads(1)
    one = _run(target, case)
    for count in (2, 3, 5):
        threads(count)
        _assert_same_bits(_run(target, case), one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALL_CASES)
def test_batch_mates(target: Target, name: str, dtype: str) -> None:
    case = replace(ALL_CASES[name], dtype=dtype)
    whole = _run(target, case)
    for b in range(case.batch):
        alone = _run(target, case, slice(b, b + 1))
        for result in (alone, whole):
            for gradient in OF_ALL_ENTRIES.get(name, ()):
                result.pop(gradient, None)
        _assert_same_bits(alone, whole, slice(b, b + 1))


@pytest.mark.parametrize("name", ALL_CASES)
def test_run_to_run(target: Target, threads: Any, name: str) -> None:
    threads(3)
    first = _run(target, ALL_CASES[name])
    for _ in range(5):
        _assert_same_bits(_run(target, ALL_CASES[name]), first)


def test_neighbouring_rows(target: Target) -> None:
    """A row's bits do not depend on the other rows of its tile (no shared running max)."""
    problem = build(Case(1, 1, 1, 64, 200, 32))
    query = problem.query.copy()
    before = target.forward(*problem.inputs)
    query[:, 1::2] *= 50.0
    after = target.forward(query, problem.key, problem.value)
    np.testing.assert_array_equal(after[0][:, ::2], before[0][:, ::2])
    np.testing.assert_array_equal(after[1][..., ::2], before[1][..., ::2])
