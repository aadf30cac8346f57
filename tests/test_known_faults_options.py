"""The known faults about dropout and packed sequences (rows C01 ... C10), on every target.

What a backend lacks asserts NotImplementedError, or that the function is not there (targets.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import philox
import pytest
import reference_packed
from cases import Case, build, check_backward
from targets import Target
from tolerance import assert_close


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


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
    half = target.forward(*problem.inputs, dropout_p=0.5, dropout_seed=3)
    np.testing.assert_array_equal(lse, half[1])
    assert_close(lse, problem.oracle.lse, problem.yardstick["lse"], name="lse")
    for gradient in (grads.dq, grads.dk, grads.dv):
        assert (gradient == 0).all()


def test_c05_dropout_counter_past_32_bits(target: Target) -> None:
    """A tile whose global element numbers exceed 2^32 (and 2^34: the counter too) draws its own
    bits.
    """
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
    """The package draws the bits of the generator that test_reference.py checks."""
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
    """Packed forward and backward against the oracle; rows in no sequence are 0, LSE -inf."""
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
    exact = reference_packed.attention_varlen(query, key, value, cu_q, cu_k, causal=True)
    slopes = reference_packed.attention_varlen_backward(
        dout, query, key, value, cu_q, cu_k, causal=True
    )
    np.testing.assert_allclose(out, exact[0], atol=2e-6)
    np.testing.assert_allclose(lse, exact[1], atol=2e-6)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(grads, name), getattr(slopes, name), atol=1e-5)
    return out, lse, grads


def test_c07_rows_past_the_last_sequence(target: Target) -> None:
    arrays = _packed(0, 21, 24, 2, 2)
    for x in arrays:
        x[-5:] = np.nan
    poison = [np.full_like(x, np.nan) for x in arrays for _ in range(8)]
    del poison  # what results may get instead of fresh memory
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
    """Sequences in slots of 12, 8 and 8 rows of which 9, 5 and 5 are theirs: the slack, made of
    sequences without keys, may hold NaN, gets gradients of 0 and changes no other bit.
    """
    forward = target.function("attention_varlen")
    backward = target.function("attention_varlen_backward")
    if forward is None or backward is None:
        return
    used = np.r_[0:9, 12:17, 20:25]
    arrays = _packed(13, 28, 28, 2, 2)
    tight = [x[used] for x in arrays]
    for x in arrays:
        x[np.setdiff1d(np.arange(28), used)] = np.nan
    slots = np.array([0, 9, 12, 17, 20, 25, 28], np.int32)
    cu = np.array([0, 9, 14, 19], np.int32)

    def run(given: list[np.ndarray], starts: np.ndarray, **opts: Any) -> list[np.ndarray]:
        dout, *inputs = given
        out, lse = forward(*inputs, starts, starts, causal=True, **opts)
        grads = backward(dout, *inputs, out, lse, starts, starts, causal=True, **opts)
        return [out, grads.dq, grads.dk, grads.dv]

    padded = run(arrays, slots, kv_lengths=np.array([9, 0, 5, 0, 5, 0], np.int32))
    for got, expected in zip(padded, run(tight, cu), strict=True):
        np.testing.assert_array_equal(got[used], expected)
        assert (np.delete(got, used, axis=0) == 0).all()
