"""merge_attention: exact, with empty parts, and differentiable."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import reference_packed
from cases import DTYPES, Case, build
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from targets import Target
from tolerance import assert_close


def draw(
    parts: int, shape: tuple[int, int, int, int], dtype: str = "float32", empty: float = 0.3
) -> tuple[list[NDArray[Any]], list[NDArray[np.float32]]]:
    """Random parts; `empty` of the rows of each saw no key and hold NaN."""
    rng = np.random.default_rng(parts)
    batch, rows, heads, _ = shape
    outs = [rng.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(parts)]
    lses = [
        (5 * rng.standard_normal((batch, heads, rows))).astype(np.float32) for _ in range(parts)
    ]
    for out, lse in zip(outs, lses, strict=True):
        none = rng.random(lse.shape) < empty
        lse[none] = -np.inf
        out[none.swapaxes(1, 2)] = np.nan
    return outs, lses


def yardstick(outs: list[NDArray[Any]], lses: list[NDArray[np.float32]]) -> tuple[float, float]:
    """How far the formula in float32, with its result in the parts' dtype, is from the oracle."""
    exact, exact_lse = reference_packed.merge_attention(outs, lses)
    sums = np.stack(lses)
    top = sums.max(axis=0)
    shift = np.where(np.isneginf(top), np.float32(0), top)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(sums - shift)
        lse = shift + np.log(weights.sum(axis=0, dtype=np.float32))
        weights = weights / weights.sum(axis=0, dtype=np.float32)
    total = np.zeros(outs[0].shape, np.float32)
    for w, x in zip(weights, outs, strict=True):
        weight = w.swapaxes(1, 2)[..., None]
        total += np.where(weight > 0, weight * x.astype(np.float32), np.float32(0))
    finite = np.isfinite(exact_lse)
    out = total.astype(outs[0].dtype).astype(np.float64)
    return (
        float(np.abs(out - exact).max(initial=0.0)),
        float(np.abs(lse[finite] - exact_lse[finite]).max(initial=0.0)),
    )


@given(
    parts=st.integers(1, 5),
    shape=st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 3), st.integers(1, 40)),
    dtype=st.sampled_from(sorted(DTYPES)),
    empty=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_parts_merge(
    target: Target, parts: int, shape: tuple[int, int, int, int], dtype: str, empty: float
) -> None:
    merge = target.function("merge_attention")
    if merge is None:
        return
    outs, lses = draw(parts, shape, dtype, empty)
    out, lse = merge(outs, lses)
    exact = reference_packed.merge_attention(outs, lses)
    allowed = yardstick(outs, lses)
    assert out.dtype == outs[0].dtype
    assert lse.dtype == np.float32
    assert_close(out, exact[0], allowed[0])
    assert_close(lse, exact[1], allowed[1], name="lse")


def test_empty_parts_contribute_nothing(target: Target) -> None:
    """One part with keys and others without: its bits. None with keys: 0 and -inf."""
    merge = target.function("merge_attention")
    if merge is None:
        return
    (out,), (lse,) = draw(1, (2, 5, 3, 8), empty=0.0)
    nothing = np.full_like(out, np.nan), np.full_like(lse, -np.inf)
    merged = merge([nothing[0], out, nothing[0]], [nothing[1], lse, nothing[1]])
    np.testing.assert_array_equal(merged[0], out)
    np.testing.assert_array_equal(merged[1], lse)
    dead, dead_lse = merge([nothing[0]] * 2, [nothing[1]] * 2)
    assert (dead == 0).all()
    assert np.isneginf(dead_lse).all()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 3), (9, 4), (1, 700)])
def test_c12_splits_of_the_keys(target: Target, seqlen_q: int, seqlen_k: int) -> None:
    """Four splits, some of them empty or wholly masked, are the call on all keys (known fault)."""
    merge = target.function("merge_attention")
    if merge is None:
        return
    problem = build(Case(1, 2, 2, seqlen_q, seqlen_k, 16, causal=True))
    query, key, value = problem.inputs
    cuts = np.linspace(0, seqlen_k, 5).astype(int)
    parts = [
        target.forward(
            query,
            key[:, a:b],
            value[:, a:b],
            causal=True,
            q_offset=seqlen_k - seqlen_q,
            k_offset=int(a),
        )
        for a, b in pairwise(cuts)
    ]
    out, lse = merge([p[0] for p in parts], [p[1] for p in parts])
    np.testing.assert_allclose(out, problem.oracle.out, atol=2e-6)
    np.testing.assert_allclose(lse, problem.oracle.lse, atol=2e-6)


def _fa() -> Any:
    return pytest.importorskip("flashattn")


def test_layouts_strides_and_threads() -> None:
    fa = _fa()
    outs, lses = draw(3, (2, 300, 4, 32))
    expected = fa.merge_attention(outs, lses)
    turned = [x.transpose(0, 2, 1, 3) for x in outs]
    out, _ = fa.merge_attention(turned, lses, layout="bhsd")
    np.testing.assert_array_equal(out.transpose(0, 2, 1, 3), expected[0])
    backwards = [np.ascontiguousarray(x[..., ::-1])[..., ::-1] for x in outs]
    np.testing.assert_array_equal(fa.merge_attention(backwards, lses)[0], expected[0])
    packed, packed_lse = fa.merge_attention([x[0] for x in outs], [x[0] for x in lses])
    np.testing.assert_array_equal(packed, expected[0][0])
    np.testing.assert_array_equal(packed_lse, expected[1][0])
    threads = fa.get_num_threads()
    try:
        for count in (1, 3):
            fa.set_num_threads(count)
            np.testing.assert_array_equal(fa.merge_attention(outs, lses)[0], expected[0])
    finally:
        fa.set_num_threads(threads)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (lambda o, s: ([], []), ValueError, "outs .empty. must hold"),
        (lambda o, s: (o, s[:1]), ValueError, r"lses.length \(1\) must equal outs.length \(2\)"),
        (lambda o, s: ([o[0], o[1][:, :2]], s), ValueError, r"outs\[1\].shape"),
        (lambda o, s: (o, [s[0], s[1][:, :, :2]]), ValueError, r"lses\[1\].shape"),
        (lambda o, s: ([o[0], o[1].astype(np.float16)], s), TypeError, r"outs\[1\].dtype"),
        (lambda o, s: (o, [x.astype(np.float64) for x in s]), TypeError, r"lses\[0\].dtype"),
        (lambda o, s: ([x.astype(np.float64) for x in o], s), TypeError, r"outs\[0\].dtype"),
        (lambda o, s: ([o[0], [1.0]], s), TypeError, r"outs\[1\]"),
    ],
)
def test_refusals(change: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match="merge_attention: " + text):
        _fa().merge_attention(*change(*draw(2, (1, 3, 2, 4))))


def test_torch_gradients() -> None:
    """Through outs and lses, against autograd through the formula in float64; once."""
    torch = pytest.importorskip("torch")
    fa = _fa()
    outs, lses = draw(3, (2, 6, 2, 5))
    parts = [torch.from_numpy(x).requires_grad_() for x in (*outs, *lses)]
    wide = [x.detach().double().requires_grad_() for x in parts]
    rng = np.random.default_rng(9)
    dout = torch.from_numpy(rng.standard_normal((2, 6, 2, 5)))
    dlse = torch.from_numpy(rng.standard_normal((2, 2, 6)))

    out, lse = fa.merge_attention(parts[:3], parts[3:])
    live = torch.isfinite(lse)
    ((out * dout.float()).sum() + (lse * dlse.float())[live].sum()).backward()

    sums = torch.stack(wide[3:])
    weights = torch.softmax(torch.where(live, sums, 0.0), 0).transpose(2, 3)[..., None]
    # Autograd would multiply 0 by what an empty part holds.
    held = torch.stack(wide[:3]).nan_to_num(0.0)
    exact = (weights * held).sum(0) * live.transpose(1, 2)[..., None]
    exact_lse = torch.logsumexp(torch.where(live, sums, 0.0), 0)
    ((exact * dout).sum() + (exact_lse * dlse)[live].sum()).backward()
    for got, want in zip(parts, wide, strict=True):
        np.testing.assert_allclose(got.grad, want.grad, atol=2e-6)

    first = torch.autograd.grad(
        fa.merge_attention(parts[:3], parts[3:])[0].square().sum(), parts[3], create_graph=True
    )[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_gradients_through_split_attention() -> None:
    """Attention in two parts, merged: the gradients of the whole."""
    torch = pytest.importorskip("torch")
    fa = _fa()
    problem = build(Case(1, 4, 2, 9, 30, 16))
    query, key, value = (torch.from_numpy(x).requires_grad_() for x in problem.inputs)
    parts = [
        fa.attention(query, key[:, s], value[:, s], return_lse=True)
        for s in (slice(0, 11), slice(11, 30))
    ]
    out, lse = fa.merge_attention([p[0] for p in parts], [p[1] for p in parts])
    torch.autograd.backward(
        (out, lse), (torch.from_numpy(problem.dout), torch.from_numpy(problem.dlse))
    )
    exact = problem.oracle_gradients
    for got, want in ((query, exact.dq), (key, exact.dk), (value, exact.dv)):
        np.testing.assert_allclose(got.grad, want, atol=1e-5)
