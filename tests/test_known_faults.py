"""Forty faults that users of attention libraries reported, re-tried here: the numeric ones, on every target.

Each test's name starts with its row (C01 ... C40). What an option or function is needed for and the backend lacks
asserts NotImplementedError (targets.py). Rows about arrays, memory and the process: test_known_faults_process.py,
which also checks that no row is without a test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import philox
import reference
from cases import Case, build, check_backward, check_forward
from naive import Naive
from targets import Target
from tolerance import GRADIENT_FACTOR, assert_close


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def _normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _identity_value(seqlen_k: int) -> np.ndarray:
    return np.eye(seqlen_k, dtype=np.float32)[None, :, None, :].copy()


def test_c01_dropout_rate_is_not_quantised(target: Target) -> None:
    """2^22 weights: the rate is p and not a multiple of 1/256, and the scale is 1 / (1 - p)."""
    opts = {"dropout_p": 0.17, "dropout_seed": 5}
    query, key, value = _zeros(1, 16384, 1, 1), _zeros(1, 256, 1, 1), _identity_value(256)
    if target.refuses(lambda: target.forward(query, key, value, **opts), opts):
        return
    weights = target.forward(query, key, value, **opts)[0]
    sigma = np.sqrt(0.17 * 0.83 / weights.size)
    assert abs((weights == 0).mean() - 0.17) < 5 * sigma
    assert abs(256 * weights.astype(np.float64).mean() - 1.0) < 5 * sigma / 0.83


def test_c02_dropout_seed_counts(target: Target) -> None:
    problem = build(Case(1, 2, 2, 20, 30, 8))

    def run(seed: int) -> Any:
        return target.forward(*problem.inputs, dropout_p=0.5, dropout_seed=seed)[0]

    if target.refuses(lambda: run(1), {"dropout_p": 0.5}):
        return
    np.testing.assert_array_equal(run(1), run(1))
    assert not np.array_equal(run(1), run(2))
    assert not np.array_equal(run(1), run(1 + 2**32))


def test_c03_backward_uses_the_forwards_mask(target: Target) -> None:
    """The keep-mask seen in forward (value = identity) explains dv."""
    opts = {"dropout_p": 0.4, "dropout_seed": 9}
    query, key, dout = _normal(0, 1, 24, 1, 8), _normal(1, 1, 32, 1, 8), _normal(2, 1, 24, 1, 32)
    value = _identity_value(32)
    if target.refuses(lambda: target.forward(query, key, value, **opts), opts):
        return
    weights, lse = target.forward(query, key, value, **opts)
    plain, _ = target.forward(query, key, value)
    keep = np.where(weights[0, :, 0] == 0, 0.0, 1 / 0.6)
    grads = target.backward(dout, query, key, value, weights, lse, **opts)
    np.testing.assert_allclose(weights[0, :, 0], plain[0, :, 0] * keep, rtol=1e-5)
    np.testing.assert_allclose(
        grads.dv[0, :, 0], (plain[0, :, 0] * keep).T @ dout[0, :, 0], atol=1e-5
    )
    check_backward(target, Case(1, 4, 2, 40, 70, 16, causal=True, dropout_p=0.4))


@pytest.mark.parametrize("p", [-1.0, -1e-9, 1.0000001, float("nan")])
def test_c04_dropout_outside_zero_to_one(target: Target, p: float) -> None:
    problem = build(Case(1, 1, 1, 3, 3, 4))
    if target.backend == "oracle":
        p = -1.0 if np.isnan(p) else p
    with pytest.raises(ValueError, match="dropout"):
        target.forward(*problem.inputs, dropout_p=p, dropout_seed=1)


def test_c04_dropout_zero_and_one(target: Target) -> None:
    problem = build(Case(1, 2, 2, 20, 30, 8))
    plain = target.forward(*problem.inputs)
    none = target.forward(*problem.inputs, dropout_p=0.0, dropout_seed=3)
    for got, expected in zip(none, plain, strict=True):
        np.testing.assert_array_equal(got, expected)
    opts = {"dropout_p": 1.0, "dropout_seed": 3}
    if target.refuses(lambda: target.forward(*problem.inputs, **opts), opts):
        return
    out, lse = target.forward(*problem.inputs, **opts)
    grads = target.backward(problem.dout, *problem.inputs, out, lse, **opts)
    assert (out == 0).all()
    np.testing.assert_array_equal(lse, plain[1])
    for gradient in (grads.dq, grads.dk, grads.dv):
        assert (gradient == 0).all()


def test_c05_dropout_counter_past_32_bits(target: Target) -> None:
    """A tile whose global element numbers exceed 2^32 (and 2^34: the counter too) draws its own bits."""
    far = philox.DropoutShard(3, 1, 1 << 19, (1 << 19) - 20, 1 << 18, (1 << 18) - 32)
    opts = {"dropout_p": 0.5, "dropout_seed": 12, "dropout_shard": far}
    query, key, value = _zeros(1, 20, 1, 4), _zeros(1, 32, 1, 4), _identity_value(32)
    if target.backend != "oracle":
        import flashattn as fa

        opts["dropout_shard"] = fa.DropoutShard(*far)
    if target.refuses(lambda: target.forward(query, key, value, **opts), opts):
        return
    out, _ = target.forward(query, key, value, **opts)
    keep = philox.dropout_mask((1, 1, 20, 32), 0.5, 12, 0, far)
    np.testing.assert_array_equal(out[0, :, 0] != 0, keep[0, 0] != 0)


def test_c06_dropout_mask_is_philox(target: Target) -> None:
    """The generator's own known answers are in test_reference.py; the package draws the same bits."""
    mask = target.function("dropout_mask")
    if mask is None:
        return
    for seed in (0, 1, 2**32 + 7, 2**64 - 1):
        expected = philox.dropout_mask((2, 3, 17, 29), 0.3, seed)
        np.testing.assert_allclose(mask((2, 3, 17, 29), 0.3, seed), expected, rtol=1e-6)


def _packed(seed: int, total_q: int, total_k: int, heads: int, kv_heads: int) -> list[np.ndarray]:
    """dout, query, key, value of packed sequences, head_dim 8."""
    sizes = ((total_q, heads), (total_q, heads), (total_k, kv_heads), (total_k, kv_heads))
    return [_normal(seed + i, *size, 8) for i, size in enumerate(sizes)]


def _check_packed(
    target: Target, arrays: list[np.ndarray], cu_q: list[int], cu_k: list[int]
) -> Any:
    """Packed forward and backward against the oracle; rows in no sequence must be 0 with LSE -inf."""
    forward, backward = (
        target.function("attention_varlen"),
        target.function("attention_varlen_backward"),
    )
    if forward is None or backward is None:
        return None
    dout, query, key, value = arrays
    lengths = np.array(cu_q, np.int32), np.array(cu_k, np.int32)
    out, lse = forward(query, key, value, *lengths, causal=True)
    grads = backward(dout, query, key, value, out, lse, *lengths, causal=True)
    exact = reference.attention_varlen(query, key, value, cu_q, cu_k, causal=True)
    slopes = reference.attention_varlen_backward(dout, query, key, value, cu_q, cu_k, causal=True)
    np.testing.assert_allclose(out, exact[0], atol=2e-6)
    np.testing.assert_allclose(lse, exact[1], atol=2e-6)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(grads, name), getattr(slopes, name), atol=1e-5)
    return out, lse, grads


def test_c07_rows_past_the_last_sequence(target: Target) -> None:
    arrays = _packed(0, 21, 24, 2, 2)
    for x in arrays:
        x[-5:] = np.nan
    result = _check_packed(target, arrays, [0, 7, 16], [0, 9, 19])
    if result is not None:
        out, lse, grads = result
        assert (out[16:] == 0).all()
        assert np.isneginf(lse[:, 16:]).all()
        for gradient, used in ((grads.dq, 16), (grads.dk, 19), (grads.dv, 19)):
            assert (np.asarray(gradient)[used:] == 0).all()


def test_c08_sequences_of_length_zero(target: Target) -> None:
    result = _check_packed(target, _packed(5, 9, 12, 2, 2), [0, 0, 5, 9, 9], [0, 4, 4, 8, 12])
    if result is not None:
        out, _, grads = result
        assert (out[:5] == 0).all()
        for gradient in (grads.dk, grads.dv):
            assert (np.asarray(gradient)[:4] == 0).all()
            assert (np.asarray(gradient)[8:] == 0).all()


def test_c09_one_query_per_sequence(target: Target) -> None:
    _check_packed(target, _packed(9, 2, 8, 9, 3), [0, 0, 1, 1, 2], [0, 0, 3, 3, 8])


def test_c10_padding_inside_the_packed_batch(target: Target) -> None:
    """Sequences in slots with slack between them: the slack is a sequence that attends to nothing."""
    arrays = _packed(13, 28, 28, 2, 2)
    for begin, end in ((9, 12), (17, 20), (25, 28)):
        for x in arrays:
            x[begin:end] = np.nan
    forward = target.function("attention_varlen")
    if forward is None:
        return
    cu_q = [0, 9, 12, 17, 20, 25]
    cu_k = np.array(cu_q, np.int32)
    out, _ = forward(*arrays[1:], cu_k, cu_k, causal=True)
    alone, _ = forward(
        *(x[12:17] for x in arrays[1:]), np.array([0, 5]), np.array([0, 5]), causal=True
    )
    np.testing.assert_allclose(out[12:17], alone, atol=1e-6)


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
    """Views whose last row lies more than 2^32 elements in (sparse files): same bits as compact copies."""
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
    out, lse = target.forward(x, x, x, scale=-1e4)
    exact = reference.attention(x, x, x, scale=-1e4)
    plain = Naive(x, x, x, scale=-1e4).forward()
    assert_close(out, exact.out, plain[0])
    assert_close(lse, exact.lse, plain[1], name="lse")


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
    """(B, T, H * D) splits into heads along the last axis, not by re-reading the memory as (B, H, T, D)."""
    packed = np.arange(24, dtype=np.float32).reshape(1, 2, 12) / 24
    split = packed.reshape(1, 2, 3, 4)
    bshd, _ = target.forward(split, split, split)
    moved = np.ascontiguousarray(split.transpose(0, 2, 1, 3))
    bhsd, _ = target.forward(moved, moved, moved, layout="bhsd")
    np.testing.assert_array_equal(bhsd.transpose(0, 2, 1, 3), bshd)
    exact, plain = reference.attention(split, split, split), Naive(split, split, split).forward()
    assert_close(bshd, exact.out, plain[0])


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
    exact = problem.oracle_gradients
    grads = target.backward(problem.dout, *problem.inputs, *group, dlse=problem.dlse, causal=True)
    plain = problem.naive_gradients
    assert_close(grads.dk, exact.dk, plain.dk, factor=GRADIENT_FACTOR, name="dk")
