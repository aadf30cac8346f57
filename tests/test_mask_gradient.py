"""The gradients of mask, ALiBi slopes and sinks: their shapes and broadcasts, alone and together.

Numbers follow the tolerance rule; what does not depend on rounding is compared as bits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import reference
from cases import DTYPES, GRADIENTS, Case, Problem, check_gradients
from targets import Target

SIZES = Case(2, 4, 2, 70, 150, 24, 16)
PATTERNS = list(product((False, True), repeat=4))  # which axes of (batch, heads, rows, keys) it has
BESIDE = {
    "alone": {},
    "causal": {"causal": True},
    "lengths": {"window": (100, 20), "kv_lengths": (150, 66)},
    "modified": {"softcap": 2.0, "alibi": "batch", "sinks": True, "dropout_p": 0.2},
}


def _full(case: Case) -> tuple[int, int, int, int]:
    return case.batch, case.heads, case.seqlen_q, case.seqlen_k


def _shape(case: Case, pattern: tuple[bool, ...]) -> tuple[int, ...]:
    return tuple(n if has else 1 for n, has in zip(_full(case), pattern, strict=True))


def _values(shape: tuple[int, ...], seed: int = 7) -> np.ndarray:
    """Finite values and holes."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape).astype(np.float32)
    return np.where(rng.random(shape) < 0.1, np.float32(-np.inf), values)


def _problem(case: Case, mask: np.ndarray) -> Problem:
    problem = Problem(case)
    problem.options["mask"] = mask
    return problem


def _gradients(target: Target, problem: Problem, **changed: Any) -> Any:
    """None when the backend lacks an option and said so."""
    opts = {**problem.options, **changed}
    if target.refuses(lambda: target.forward(*problem.inputs, **opts), opts):
        return None
    out, lse = target.forward(*problem.inputs, **opts)
    return target.backward(problem.dout, *problem.inputs, out, lse, dlse=problem.dlse, **opts)


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize(
    "pattern", PATTERNS, ids=lambda p: "".join("bhqk"[i] for i in range(4) if p[i]) or "scalar"
)
def test_every_broadcast(target: Target, pattern: tuple[bool, ...], beside: str) -> None:
    case = replace(SIZES, **BESIDE[beside])
    problem = _problem(case, _values(_shape(case, pattern)))
    grads = _gradients(target, problem)
    if grads is not None:
        assert grads.dmask.shape == problem.options["mask"].shape
        assert grads.dmask.dtype == np.float32
        check_gradients(problem, grads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "pattern", [(True,) * 4, (False, False, True, True), (True, False, False, True)], ids=str
)
def test_every_dtype(target: Target, pattern: tuple[bool, ...], dtype: str) -> None:
    case = replace(SIZES, dtype=dtype)
    problem = _problem(case, _values(_shape(case, pattern)))
    grads = _gradients(target, problem)
    if grads is not None:
        check_gradients(problem, grads)


@pytest.mark.parametrize(
    "shape", [(150,), (1,), (70, 150), (70, 1), (4, 1, 1), (4, 70, 150)], ids=str
)
def test_fewer_axes(target: Target, shape: tuple[int, ...]) -> None:
    problem = _problem(SIZES, _values(shape))
    grads = _gradients(target, problem)
    if grads is not None:
        assert grads.dmask.shape == shape
        check_gradients(problem, grads)


def test_many_rows_are_summed(target: Target) -> None:
    """One mask for 2 x 8 x 600 rows: the sum's own rounding stays inside the rule."""
    case = Case(2, 8, 4, 600, 130, 16)
    problem = _problem(case, _values((1, 1, 1, 130)))
    grads = _gradients(target, problem)
    if grads is not None:
        check_gradients(problem, grads)


@pytest.mark.parametrize(
    "wide", [np.float16, ml_dtypes.bfloat16, np.float64], ids=lambda d: np.dtype(d).name
)
def test_mask_dtypes(target: Target, wide: Any) -> None:
    """The gradient is float32, or float64 for a float64 mask: the same numbers."""
    mask = _values(_shape(SIZES, (False, True, True, True))).astype(wide)
    grads = _gradients(target, _problem(SIZES, mask))
    if grads is None:
        return
    plain = _gradients(target, _problem(SIZES, mask.astype(np.float32)))
    assert grads.dmask.dtype == (np.float64 if wide is np.float64 else np.float32)
    for name in ("dq", "dk", "dv", "dmask"):
        got = np.asarray(getattr(grads, name)).astype(np.float32)
        np.testing.assert_array_equal(got, getattr(plain, name), err_msg=name)


def _restrided(mask: np.ndarray, kind: str) -> np.ndarray:
    if kind == "transposed":
        return mask.transpose(3, 2, 1, 0).copy().transpose(3, 2, 1, 0)
    if kind == "reversed":
        return mask[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1]
    room = np.full((*mask.shape[:3], 2 * mask.shape[3]), np.nan, mask.dtype)
    room[..., ::2] = mask
    return room[..., ::2]


@pytest.mark.parametrize("kind", ["transposed", "reversed", "stepped"])
@pytest.mark.parametrize("mask_kind", ["bool", "float32", "bfloat16"])
def test_mask_strides_change_nothing(target: Target, mask_kind: str, kind: str) -> None:
    mask = _values(_full(SIZES))
    mask = mask > -1 if mask_kind == "bool" else mask.astype(DTYPES[mask_kind])
    if mask_kind == "bool" and kind == "stepped":
        kind = "transposed"
    plain = _gradients(target, _problem(SIZES, mask))
    if plain is None:
        return
    moved = _gradients(target, _problem(SIZES, _restrided(mask, kind)))
    for name in GRADIENTS:
        if getattr(plain, name) is not None:
            np.testing.assert_array_equal(getattr(moved, name), getattr(plain, name), err_msg=name)


def test_mask_of_stride_zero(target: Target) -> None:
    """A mask expanded to the full shape has a gradient of the full shape, unsummed."""
    row = _values((1, 1, 1, SIZES.seqlen_k))
    spread = np.broadcast_to(row, _full(SIZES))
    grads = _gradients(target, _problem(SIZES, spread))
    if grads is None:
        return
    full = _gradients(target, _problem(SIZES, spread.copy()))
    np.testing.assert_array_equal(grads.dmask, full.dmask)


def test_gradient_of_unseen_elements_is_zero(target: Target) -> None:
    """-inf, excluded by causal, or tiles that nobody sees: exactly 0."""
    case = Case(1, 2, 2, 200, 260, 16, causal=True)
    mask = _values(_full(case))
    mask[:, :, 64:128, 64:130] = -np.inf
    problem = _problem(case, mask)
    grads = _gradients(target, problem)
    if grads is not None:
        assert (grads.dmask[~problem.oracle.visible] == 0).all()
        check_gradients(problem, grads)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("sizes", [(0, 4, 5), (2, 0, 5), (2, 4, 0), (0, 0, 0)], ids=str)
def test_empty(target: Target, sizes: tuple[int, int, int], dense: bool) -> None:
    """Nothing to sum: zeros, except that a row without keys still has its sink's weight."""
    batch, seqlen_q, seqlen_k = sizes
    case = Case(batch, 4, 2, seqlen_q, seqlen_k, 8, alibi="head", sinks=True, softcap=3.0)
    shape = (batch, 4, seqlen_q, seqlen_k) if dense else (batch, 1, 1, seqlen_k)
    problem = _problem(case, np.zeros(shape, np.float32))
    grads = _gradients(target, problem)
    if grads is None:
        return
    exact = problem.oracle_gradients
    for name in GRADIENTS:
        got, expected = getattr(grads, name), getattr(exact, name)
        assert got.shape == expected.shape, name
        np.testing.assert_allclose(got, expected, rtol=1e-6, err_msg=name)
    if seqlen_k == 0 and batch and seqlen_q:
        assert (np.asarray(grads.dsinks) != 0).all()


WANTED = ("query", "key", "value", "mask", "alibi_slopes", "sinks")


@pytest.mark.parametrize("alone", WANTED)
def test_one_gradient_alone(target: Target, alone: str) -> None:
    """Through torch's autograd: its bits do not depend on what else is asked for."""
    torch = pytest.importorskip("torch")
    case = replace(SIZES, alibi="head", sinks=True, softcap=3.0, dropout_p=0.3, causal=True)
    problem = _problem(case, _values((1, 4, 70, 150)))
    full = _gradients(target, problem)
    if full is None or target.backend != "cpu":
        return  # torch CPU tensors are the cpu backend's
    import flashattn as fa

    arrays = dict(zip(WANTED, problem.inputs, strict=False)) | problem.options
    tensors = {n: torch.from_numpy(arrays[n].copy()) for n in WANTED}
    tensors[alone].requires_grad_()
    opts = {n: x for n, x in problem.options.items() if n not in WANTED}
    out, lse = fa.attention(
        *(tensors[n] for n in WANTED[:3]),
        **{n: tensors[n] for n in WANTED[3:]},
        **opts,
        return_lse=True,
    )
    torch.autograd.backward(
        (out, lse), (torch.from_numpy(problem.dout), torch.from_numpy(problem.dlse))
    )
    for name, gradient in zip(WANTED, GRADIENTS, strict=True):
        if name == alone:
            np.testing.assert_array_equal(tensors[name].grad.numpy(), getattr(full, gradient))
        else:
            assert tensors[name].grad is None


def _loss(target: Target, problem: Problem, opts: dict[str, Any]) -> float:
    out, lse = target.forward(*problem.inputs, **opts)
    pairs = ((out, problem.dout), (lse, problem.dlse))
    return sum(float((np.float64(x) * np.float64(d)).sum()) for x, d in pairs)


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks", "mask"])
def test_finite_differences(target: Target, name: str) -> None:
    """The derivative of the forward's own results, by central differences of two widths.

    They may differ from the gradient by the truncation error, which their own difference bounds,
    and by the rounding of the results over the width.
    """
    case = Case(2, 2, 1, 20, 40, 8, alibi="head", sinks=True, softcap=2.0, dropout_p=0.2)
    problem = _problem(case, _values((1, 2, 1, 40)))
    grads = _gradients(target, problem)
    if grads is None:
        return
    gradient = getattr(grads, {"mask": "dmask"}.get(name, "d" + name))
    base = problem.options[name]
    rounding = float(np.abs(problem.dout).sum() + np.abs(problem.dlse).sum()) * 2.0**-23

    def slope(at: tuple[int, ...], width: float) -> float:
        ends = []
        for sign in (1, -1):
            moved = base.copy()
            moved[at] += np.float32(sign * width)
            ends.append(_loss(target, problem, {**problem.options, name: moved}))
        return (ends[0] - ends[1]) / (2 * width)

    for at in list(np.ndindex(base.shape))[:8]:
        if not np.isfinite(base[at]):
            continue
        near, far = slope(at, 0.015625), slope(at, 0.03125)
        allowed = abs(far - near) + rounding / 0.015625
        assert abs(float(gradient[at]) - near) <= allowed, at
        assert allowed < 0.2 * float(np.abs(gradient).max())  # the bound says something


def test_reference_sums_as_documented() -> None:
    """The oracle's own broadcasting of dmask, on a case small enough to write out."""
    problem = _problem(Case(2, 2, 1, 2, 3, 4), np.zeros((2, 1, 1, 3), np.float32))
    full = _problem(Case(2, 2, 1, 2, 3, 4), np.zeros((2, 2, 2, 3), np.float32))
    summed = full.oracle_gradients.dmask.sum(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(problem.oracle_gradients.dmask, summed, atol=1e-14)
    assert isinstance(problem.oracle_gradients, reference.Gradients)
