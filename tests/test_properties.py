"""Properties over the whole option space: random problems against the oracle, forward and backward.

Derandomised and small by default; FLASHATTN_HYPOTHESIS=nightly draws afresh and far more
(conftest.py).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import reference_packed
from cases import Case, Problem, check_backward, check_forward
from hypothesis import example, given
from hypothesis import strategies as st
from targets import Target

HEAD_DIMS = st.one_of(
    st.integers(1, 96), st.sampled_from([3, 59, 64, 80, 111, 127, 128, 129, 200, 256])
)
if os.environ.get("FLASHATTN_HYPOTHESIS") == "simulated":
    # There every pair of tile sizes is a kernel to compile: a narrow, an uneven and a wide one.
    HEAD_DIMS = st.one_of(st.integers(1, 16), st.integers(33, 48), st.integers(129, 160))
LENGTHS = st.one_of(
    st.integers(1, 20), st.integers(1, 150), st.sampled_from([63, 64, 65, 128, 129])
)
BOUND = st.one_of(st.just(-1), st.integers(0, 5), st.integers(0, 200))


@st.composite
def plain_cases(draw: st.DrawFn) -> Case:
    """Sizes, dtype, scale and everything that is an interval of keys per row."""
    batch, kv_heads, group = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
    )
    seqlen_q, seqlen_k = draw(LENGTHS), draw(LENGTHS)
    offsets: dict[str, Any] = {}
    kind = draw(st.sampled_from(["none", "none", "one", "per_batch"]))
    position = st.integers(-40, 200)
    if kind == "one":
        offsets = {"q_offset": draw(position), "k_offset": draw(st.integers(0, 60))}
    elif kind == "per_batch":
        offsets = {
            "q_offset": tuple(draw(position) for _ in range(batch)),
            "k_offset": draw(position),
        }
    lengths = None
    if draw(st.booleans()):
        lengths = tuple(draw(st.integers(0, seqlen_k)) for _ in range(batch))
    return Case(
        batch,
        kv_heads * group,
        kv_heads,
        seqlen_q,
        seqlen_k,
        draw(HEAD_DIMS),
        draw(st.one_of(st.none(), HEAD_DIMS)),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        causal=draw(st.sampled_from([False, True, "top_left"])),
        window=draw(st.one_of(st.none(), st.tuples(BOUND, BOUND))),
        scale=draw(st.one_of(st.none(), st.floats(-1.0, 1.0, width=32))),
        kv_lengths=lengths,
        seed=draw(st.integers(0, 5)),
        **offsets,
    )


@st.composite
def any_cases(draw: st.DrawFn) -> Case:
    """plain_cases plus at least one score modifier."""
    modifiers = {
        "softcap": st.floats(0.5, 20.0, width=32),
        "mask": st.sampled_from(["bool", "bool_keys", "additive", "additive_keys", "holes"]),
        "alibi": st.sampled_from(["head", "batch"]),
        "sinks": st.just(True),
        "dropout_p": st.sampled_from([0.1, 0.5, 0.9]),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(modifiers)), min_size=1))
    return replace(draw(plain_cases()), **{n: draw(modifiers[n]) for n in sorted(chosen)})


@given(case=plain_cases())
@example(case=Case(1, 12, 3, 1, 1, 146))  # long sums, few of them to choose the worst from
def test_forward(target: Target, case: Case) -> None:
    check_forward(target, case)


@given(case=plain_cases())
@example(case=Case(2, 2, 2, 5, 89, 4, 138, causal="top_left", seed=5))
def test_backward(target: Target, case: Case) -> None:
    check_backward(target, case)


@given(case=any_cases())
def test_score_modifiers(target: Target, case: Case) -> None:
    check_forward(target, case)
    check_backward(target, case)


@given(case=plain_cases(), cut=st.floats(0.0, 1.0))
def test_disjoint_keys_merge(target: Target, case: Case, cut: float) -> None:
    """Any split of the keys, merged by LSE, is the whole; either side may see nothing."""
    q_offset = 3 if case.q_offset is None else case.q_offset
    case = replace(case, dtype="float32", kv_lengths=None, q_offset=q_offset, k_offset=0)
    problem = Problem(case)
    at = round(cut * case.seqlen_k)
    opts = {n: x for n, x in problem.options.items() if n != "k_offset"}
    parts = [
        target.forward(
            problem.query, problem.key[:, s], problem.value[:, s], k_offset=s.start, **opts
        )
        for s in (slice(0, at), slice(at, case.seqlen_k))
    ]
    out, lse = reference_packed.merge_attention([p[0] for p in parts], [p[1] for p in parts])
    size = max(
        1.0, float(np.abs(problem.oracle.lse[np.isfinite(problem.oracle.lse)]).max(initial=0.0))
    )
    np.testing.assert_allclose(out, problem.oracle.out, atol=3e-6 * size)
    np.testing.assert_allclose(lse, problem.oracle.lse, atol=3e-6 * size)


@given(case=plain_cases(), order=st.randoms(use_true_random=False))
def test_key_order_does_not_matter(target: Target, case: Case, order: Any) -> None:
    """Attention without positions is a set operation: permuting the keys permutes dk, dv and
    nothing else.
    """
    case = replace(
        case,
        dtype="float32",
        causal=False,
        window=None,
        kv_lengths=None,
        q_offset=None,
        k_offset=None,
    )
    problem = Problem(case)
    permutation = list(range(case.seqlen_k))
    order.shuffle(permutation)
    key, value = problem.key[:, permutation], problem.value[:, permutation]
    out, lse = target.forward(problem.query, key, value, **problem.options)
    grads = target.backward(
        problem.dout, problem.query, key, value, out, lse, dlse=problem.dlse, **problem.options
    )
    exact = problem.oracle_gradients
    for got, expected in (
        (out, problem.oracle.out),
        (grads.dq, exact.dq),
        (grads.dk, exact.dk[:, permutation]),
        (grads.dv, exact.dv[:, permutation]),
    ):
        np.testing.assert_allclose(
            got, expected, atol=1e-5 * max(1.0, float(np.abs(expected).max(initial=0)))
        )
