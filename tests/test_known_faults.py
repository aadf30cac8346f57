"""Forty faults that users of attention libraries reported, re-tried here: the numeric ones, on
every target.

A row is one report, and a test's name starts with it. What a backend lacks asserts
NotImplementedError (targets.py). Rows C01 to C10: test_known_faults_options.py; C19 to C33, and the
check that no row is without a test: test_known_faults_process.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Case, build, check_arrays, check_backward, check_forward, check_gradients
from targets import Target


def _normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("behind", [1e2, 1e3, np.nan])
@pytest.mark.parametrize("length", [8, 9, 64, 79, 2049])
@pytest.mark.parametrize("seqlen_q", [1, 33])
def test_c11_rows_behind_a_slice_of_a_cache(
    target: Target, seqlen_q: int, length: int, behind: float
) -> None:
    """A slice of a longer cache is its compact copy: same result, bit for bit."""
    query = _normal(0, 1, 2, seqlen_q, 32)
    caches = [np.full((1, 1, length + 70, 32), behind, np.float32) for _ in range(2)]
    for seed, cache in enumerate(caches):
        cache[:, :, :length] = _normal(seed + 1, 1, 1, length, 32)
    views = [c[:, :, :length] for c in caches]
    sliced = target.forward(query, *views, layout="bhsd")
    compact = target.forward(query, *(v.copy() for v in views), layout="bhsd")
    for got, expected in zip(sliced, compact, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_c12_splits_without_a_key(target: Target) -> None:
    """Fewer keys than a backend has splits, and rows whose every split is empty."""
    check_forward(target, Case(1, 4, 2, 1, 3, 16))
    check_forward(target, Case(1, 4, 2, 7, 3, 16, causal=True))
    check_forward(target, Case(2, 4, 2, 1, 700, 16, kv_lengths=(0, 1), causal=True))
    out, lse = target.forward(*build(Case(1, 4, 2, 7, 3, 16, causal=True)).inputs, causal=True)
    assert (out[:, :4] == 0).all()
    assert np.isneginf(lse[..., :4]).all()


def test_c12_merge_of_dead_parts(target: Target) -> None:
    merge = target.function("merge_attention")
    if merge is None:
        return
    out, lse = _normal(0, 1, 5, 2, 8), _normal(1, 1, 2, 5)
    dead = np.full_like(lse, -np.inf)
    merged = merge([np.full_like(out, 7.0), out], [dead, lse])
    np.testing.assert_array_equal(merged[0], out)
    np.testing.assert_array_equal(merged[1], lse)
    nothing = merge([out, out], [dead, dead])
    assert (nothing[0] == 0).all()
    assert np.isneginf(nothing[1]).all()


def _far_apart(path: Path, shape: tuple[int, ...], axis: int, step: int, seed: int) -> np.ndarray:
    """float16 noise whose rows along `axis` lie `step` elements apart in a sparse file."""
    strides = [2 * int(np.prod(shape[a + 1 :])) for a in range(4)]
    strides[axis] = 2 * step
    elements = step * (shape[axis] - 1) + int(np.prod(shape))
    flat = np.memmap(path, np.float16, "w+", shape=(elements,))
    view = np.lib.stride_tricks.as_strided(flat, shape, strides)
    view[...] = _normal(seed, *shape, dtype=np.float16)
    return view


@pytest.mark.parametrize("seqlen_q", [2, 40])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_c13_offsets_past_32_bits(target: Target, tmp_path: Path, axis: int, seqlen_q: int) -> None:
    """Views whose last row lies more than 2^32 elements in (sparse files): same bits as compact
    copies.
    """
    seqlen_k, heads = (seqlen_q, 2)
    shape = (2, seqlen_k, heads, 8)
    step = (2**32 + 2**20) // (shape[axis] - 1)
    views = [_far_apart(tmp_path / f"{n}.bin", shape, axis, step, n) for n in range(4)]
    copies = [np.ascontiguousarray(v) for v in views]
    far, near = ([*target.forward(*x[:3], causal=True)] for x in (views, copies))
    for x, results in ((views, far), (copies, near)):
        grads = target.backward(x[3], *x[:3], *results, causal=True)
        results += [grads.dq, grads.dk, grads.dv]
    for got, expected in zip(far, near, strict=True):
        np.testing.assert_array_equal(got, expected)
    del views


def test_c14_double_backward_is_an_error(target: Target) -> None:
    torch = pytest.importorskip("torch")
    if target.backend == "oracle":
        return
    import flashattn as fa

    tensors = [torch.from_numpy(x).requires_grad_() for x in build(Case(1, 1, 1, 3, 4, 8)).inputs]
    out = fa.attention(*tensors, backend=target.backend)
    (dq,) = torch.autograd.grad(out.square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(dq.square().sum(), tensors[:1])


def test_c15_float64_is_a_clear_error(target: Target) -> None:
    if target.backend == "oracle":
        return
    inputs = [x.astype(np.float64) for x in build(Case(1, 1, 1, 4, 6, 8)).inputs]
    with pytest.raises(TypeError, match=r"query\.dtype \(float64\)"):
        target.forward(*inputs)


def test_c16_float32_mask_with_bfloat16_arrays(target: Target) -> None:
    """The mask's gradient is float32, finite and right."""
    case = Case(2, 4, 2, 20, 20, 16, dtype="bfloat16", mask="additive_keys")
    grads = check_backward(target, case)
    if grads is not None:
        assert grads.dmask.dtype == np.float32
        assert grads.dmask.shape == (1, 4, 1, 20)
        assert np.isfinite(grads.dmask).all()


def test_c17_mixed_dtypes(target: Target) -> None:
    if target.backend == "oracle":
        return
    query, key, value = build(Case(1, 1, 1, 4, 6, 8)).inputs
    with pytest.raises(TypeError, match=r"key.*float16"):
        target.forward(query, key.astype(np.float16), value)
    with pytest.raises(TypeError, match=r"value.*float16"):
        target.forward(query, key, value.astype(np.float16))
    for kind in (np.int64, np.uint8, np.int32):
        with pytest.raises(TypeError, match=rf"mask.*{np.dtype(kind).name}"):
            target.forward(query, key, value, mask=np.ones((4, 6), kind))


def test_c18_negative_scale(target: Target) -> None:
    """The running max is that of the scaled scores."""
    x = _normal(0, 1, 64, 3, 64)
    check_arrays(target, x, x, x, scale=-1e4)


def test_c34_alibi_slopes_of_six_heads(target: Target) -> None:
    slopes = target.function("alibi_slopes")
    if slopes is not None:
        np.testing.assert_array_equal(slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])


@pytest.mark.parametrize("mask", ["bool", "additive", "holes"])
def test_c35_causal_together_with_a_mask(target: Target, mask: str) -> None:
    """The intersection, whatever the kind of mask."""
    check_forward(target, Case(2, 4, 2, 30, 40, 16, causal=True, mask=mask))
    check_backward(target, Case(2, 4, 2, 30, 40, 16, causal=True, mask=mask))


def test_c36_window_of_minus_one_is_unlimited(target: Target) -> None:
    inputs = build(Case(1, 1, 1, 3, 3, 4)).inputs
    causal = target.forward(*inputs, causal=True)
    for got, expected in zip(target.forward(*inputs, window=(-1, 0)), causal, strict=True):
        np.testing.assert_array_equal(got, expected)
    if target.backend != "oracle":
        with pytest.raises(ValueError, match=r"window.*-2"):
            target.forward(*inputs, window=(-2, 0))


def test_c37_minus_infinity_everywhere_is_a_dead_row(target: Target) -> None:
    """An excluded key never comes back, not even when every other key is at -inf too."""
    inputs = build(Case(1, 1, 1, 2, 3, 4)).inputs
    opts = {"mask": np.full((1, 1, 2, 3), -np.inf, np.float32)}
    if target.refuses(lambda: target.forward(*inputs, **opts), opts):
        return
    out, lse = target.forward(*inputs, **opts)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_c38_packed_heads(target: Target) -> None:
    """(B, T, H * D) splits into heads along the last axis, not by re-reading the memory as (B, H,
    T, D).
    """
    packed = np.arange(24, dtype=np.float32).reshape(1, 2, 12) / 24
    split = packed.reshape(1, 2, 3, 4)
    bshd, _ = target.forward(split, split, split)
    moved = np.ascontiguousarray(split.transpose(0, 2, 1, 3))
    bhsd, _ = target.forward(moved, moved, moved, layout="bhsd")
    np.testing.assert_array_equal(bhsd.transpose(0, 2, 1, 3), bshd)
    check_arrays(target, split, split, split)


def test_c39_size_one_axes_with_odd_strides(target: Target) -> None:
    query = np.array([[[[0.5]], [[-1.5]]]], np.float32).transpose(
        0, 2, 1, 3
    )  # (1, 1, 2, 1) by transpose
    one = np.ones((1, 1, 1, 1), np.float32)
    out, lse = target.forward(query, one, 3 * one)
    np.testing.assert_array_equal(out, np.full((1, 1, 2, 1), 3.0))
    np.testing.assert_allclose(lse.ravel(), [0.5, -1.5], rtol=1e-6)


def test_c40_decode_keeps_the_order_of_heads(target: Target) -> None:
    """LSE of one query is (B, H, 1) in head order, and the second row of a two-row call."""
    problem = build(Case(2, 6, 2, 3, 500, 16, causal=True))
    query, key, value = problem.inputs
    group = target.forward(query, key, value, causal=True)  # seqlen_q == heads per kv head
    for rows in (1, 2):
        out, lse = target.forward(query[:, -rows:], key, value, causal=True)
        assert lse.shape == (2, 6, rows)
        np.testing.assert_allclose(out, group[0][:, -rows:], atol=2e-6)
        np.testing.assert_allclose(lse, group[1][:, :, -rows:], atol=2e-6)
    grads = target.backward(problem.dout, *problem.inputs, *group, dlse=problem.dlse, causal=True)
    check_gradients(problem, grads)
