"""Backward: every gradient, with the gradient of lse, against the closed form in float64, on every
target.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import reference
from cases import DTYPES, GRADIENTS, Case, build, check_backward, check_gradients
from targets import Target
from test_forward import CAUSAL, OPTIONS, SHAPES, STRIDES, _restride
from tolerance import GRADIENT_FACTOR, assert_close
from yardstick import gradient_yardstick


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda c: c.id)
def test_matches_the_oracle(target: Target, shape: Case, dtype: str, causal: bool | str) -> None:
    check_backward(target, replace(shape, dtype=dtype, causal=causal))


def test_head_dim_512(target: Target) -> None:
    case = Case(1, 2, 1, 5, 70, 512)
    if target.max_head_dim < 512:
        problem = build(case)
        room = np.zeros_like(problem.dout), np.zeros_like(problem.dlse)
        with pytest.raises(NotImplementedError, match="head_dim"):
            target.backward(problem.dout, *problem.inputs, *room)
        return
    check_backward(target, case)


@pytest.mark.parametrize("scale", [0.0, -1.0, 0.02, 3.0])
def test_scale(target: Target, scale: float) -> None:
    check_backward(target, Case(1, 2, 1, 21, 43, 24, scale=scale))


@pytest.mark.parametrize("name", OPTIONS)
def test_score_options(target: Target, name: str) -> None:
    check_backward(target, replace(Case(2, 4, 2, 21, 43, 24), **OPTIONS[name]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_dlse(target: Target, dtype: str) -> None:
    """Leaving dlse out is dlse = 0, bit for bit, and right."""
    problem = build(Case(1, 4, 2, 30, 41, 20, dtype=dtype, causal=True))
    out, lse = target.forward(*problem.inputs, causal=True)
    none = target.backward(problem.dout, *problem.inputs, out, lse, causal=True)
    zero = target.backward(
        problem.dout, *problem.inputs, out, lse, dlse=np.zeros_like(problem.dlse), causal=True
    )
    exact = reference.attention_backward(problem.dout, *problem.inputs, causal=True)
    plain = gradient_yardstick(problem.dout, problem.inputs, None, {"causal": True})
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(none, name), getattr(zero, name))
        assert_close(
            getattr(none, name),
            getattr(exact, name),
            plain[name],
            factor=GRADIENT_FACTOR,
            name=name,
        )


def test_only_dlse(target: Target) -> None:
    """With dout = 0 the gradient is the softmax's pull on lse alone: dv = 0, dq = scale * p k *
    dlse.
    """
    problem = build(Case(1, 2, 2, 17, 29, 16))
    out, lse = target.forward(*problem.inputs)
    silent = np.zeros_like(problem.dout)
    grads = target.backward(silent, *problem.inputs, out, lse, dlse=problem.dlse)
    exact = reference.attention_backward(silent, *problem.inputs, problem.dlse)
    plain = gradient_yardstick(silent, problem.inputs, problem.dlse, {})
    assert (grads.dv == 0).all()
    for name in ("dq", "dk"):
        assert_close(
            getattr(grads, name),
            getattr(exact, name),
            plain[name],
            factor=GRADIENT_FACTOR,
            name=name,
        )


def test_absent_inputs_have_no_gradient(target: Target) -> None:
    problem = build(Case(1, 2, 2, 5, 6, 8))
    out, lse = target.forward(*problem.inputs)
    grads = target.backward(problem.dout, *problem.inputs, out, lse)
    assert [getattr(grads, n) is None for n in GRADIENTS] == [False] * 3 + [True] * 3


@pytest.mark.parametrize("wanted", [w for w in product((False, True), repeat=3) if any(w)], ids=str)
def test_subset_of_gradients(target: Target, wanted: tuple[bool, bool, bool]) -> None:
    """A gradient does not depend on which others are asked for."""
    torch = pytest.importorskip("torch")
    if target.backend == "oracle":
        return  # the oracle has no way to be asked for less
    import flashattn as fa

    problem = build(Case(1, 4, 2, 30, 41, 20, causal=True))
    out, lse = target.forward(*problem.inputs, causal=True)
    full = target.backward(problem.dout, *problem.inputs, out, lse, causal=True)
    tensors = [
        torch.from_numpy(x).requires_grad_(w) for x, w in zip(problem.inputs, wanted, strict=True)
    ]
    out = fa.attention(*tensors, causal=True, backend=target.backend)
    out.backward(torch.from_numpy(problem.dout))
    for tensor, name, want in zip(tensors, ("dq", "dk", "dv"), wanted, strict=True):
        if want:
            np.testing.assert_array_equal(tensor.grad.numpy(), getattr(full, name))
        else:
            assert tensor.grad is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", STRIDES)
def test_strides_change_nothing(target: Target, kind: str, dtype: str) -> None:
    problem = build(Case(2, 4, 2, 13, 37, 17, dtype=dtype, causal=True))
    out, lse = target.forward(*problem.inputs, causal=True)
    plain = target.backward(problem.dout, *problem.inputs, out, lse, dlse=problem.dlse, causal=True)
    moved = target.backward(
        *(_restride(x, kind) for x in (problem.dout, *problem.inputs, out)),
        lse,
        dlse=problem.dlse[:, :, ::-1].copy()[:, :, ::-1],
        causal=True,
    )
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(moved, name), getattr(plain, name), err_msg=name)


def test_dout_of_stride_zero(target: Target) -> None:
    """The gradient of a sum: dout is one number seen everywhere."""
    problem = build(Case(2, 4, 2, 13, 37, 16))
    out, lse = target.forward(*problem.inputs)
    ones = np.broadcast_to(np.float32(1), out.shape)
    spread = target.backward(ones, *problem.inputs, out, lse)
    full = target.backward(ones.copy(), *problem.inputs, out, lse)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(spread, name), getattr(full, name))


def test_layout_bhsd(target: Target) -> None:
    problem = build(Case(2, 4, 2, 13, 37, 16, 24, causal=True))
    out, lse = target.forward(*problem.inputs, causal=True)
    plain = target.backward(problem.dout, *problem.inputs, out, lse, causal=True)
    swapped = [x.transpose(0, 2, 1, 3) for x in (problem.dout, *problem.inputs, out)]
    grads = target.backward(*swapped, lse, causal=True, layout="bhsd")
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(
            getattr(grads, name).transpose(0, 2, 1, 3), getattr(plain, name)
        )


@pytest.mark.parametrize("sizes", [(0, 4, 5), (2, 0, 5), (2, 4, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("causal", CAUSAL)
def test_empty(target: Target, sizes: tuple[int, int, int], causal: bool | str) -> None:
    batch, seqlen_q, seqlen_k = sizes
    problem = build(Case(batch, 4, 2, seqlen_q, seqlen_k, 8, causal=causal))
    out, lse = target.forward(*problem.inputs, causal=causal)
    grads = target.backward(
        problem.dout, *problem.inputs, out, lse, dlse=problem.dlse, causal=causal
    )
    for name, x in zip(("dq", "dk", "dv"), problem.inputs, strict=True):
        assert getattr(grads, name).shape == x.shape
        assert (getattr(grads, name) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dead_rows_give_exactly_zero(target: Target, dtype: str) -> None:
    """Rows without a visible key, and keys without a row, get 0 whatever dout and dlse hold."""
    problem = build(Case(1, 2, 2, 40, 25, 20, dtype=dtype, causal=True))
    dout, dlse = problem.dout.copy(), problem.dlse.copy()
    dout[:, :15], dlse[..., :15] = np.nan, np.nan
    out, lse = target.forward(*problem.inputs, causal=True)
    grads = target.backward(dout, *problem.inputs, out, lse, dlse=dlse, causal=True)
    assert (np.asarray(grads.dq[:, :15]).astype(np.float32) == 0).all()
    check_gradients(problem, grads)

    first = build(Case(1, 2, 2, 10, 30, 20, dtype=dtype, causal="top_left"))
    out, lse = target.forward(*first.inputs, causal="top_left")
    grads = target.backward(first.dout, *first.inputs, out, lse, causal="top_left")
    for gradient in (grads.dk, grads.dv):
        assert (np.asarray(gradient[:, 10:]).astype(np.float32) == 0).all()


def test_huge_logits(target: Target) -> None:
    check_backward(target, Case(1, 2, 2, 33, 70, 64, magnitude=12.0))
