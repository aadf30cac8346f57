"""flashattn.jax.dot_product_attention: jax.nn's signature, its numbers and its gradients."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from tolerance import GRADIENT_FACTOR, assert_close
from yardstick import forward_yardstick, gradient_yardstick

jax = pytest.importorskip("jax")
jnp = jax.numpy

from flashattn.jax import dot_product_attention  # noqa: E402 - needs jax

B, T, S, N, K, H = 2, 11, 14, 4, 2, 16


def arrays(seed: int = 0, dtype: Any = np.float32) -> list[Any]:
    rng = np.random.default_rng(seed)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def test_the_signature_is_jax_nns() -> None:
    ours = inspect.signature(dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert list(ours) == list(theirs)
    assert [(p.kind, p.default) for p in ours.values()] == [
        (p.kind, p.default) for p in theirs.values()
    ]


def calls() -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(3)
    bias = rng.standard_normal((1, N, T, S)).astype(np.float32)
    mask = rng.random((B, 1, T, S)) < 0.7
    mask[..., 0] = True
    lengths = np.array([S - 3, 2], np.int32)
    return {
        "plain": {},
        "scale": {"scale": 0.5},
        "causal": {"is_causal": True},
        "bias": {"bias": bias},
        "bias of keys": {"bias": bias[:, :, :1]},
        "mask": {"mask": mask},
        "bias and mask": {"bias": bias, "mask": mask, "is_causal": True},
        "window": {"mask": mask[:, :, :1] | True, "local_window_size": (3, 2)},
        "one window": {"is_causal": True, "local_window_size": 4},
        "key lengths": {"key_value_seq_lengths": lengths, "is_causal": True},
        "query lengths": {"query_seq_lengths": np.array([T, 3], np.int32)},
        "lengths": {
            "query_seq_lengths": np.array([4, T], np.int32),
            "key_value_seq_lengths": lengths + 50,
            "bias": bias,
        },
    }


@pytest.mark.parametrize("name", list(calls()))
def test_the_numbers_of_jax_nn(name: str) -> None:
    options = {
        n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in calls()[name].items()
    }
    q, k, v, dout = arrays()

    def run(attend: Any, *inputs: Any) -> Any:
        def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return attend(q, k, v, **{**options, "bias": bias}, return_residual=True)

        (out, residual), back = jax.vjp(call, *inputs)
        # The residual passes no gradient on, as in jax.nn.
        return out, residual, *back((dout.astype(out.dtype), jnp.ones_like(residual)))

    bias = options.get("bias")
    got = run(dot_product_attention, q, k, v, bias)
    with jax.enable_x64(True):
        wide = (None if x is None else x.astype(np.float64) for x in (q, k, v, bias))
        expected = run(jax.nn.dot_product_attention, *wide)
    plain = tuple(map(np.asarray, (q, k, v)))
    forward = forward_yardstick(plain, {})
    backward = gradient_yardstick(np.asarray(dout), plain, None, {})
    assert_close(got[0], expected[0], forward["out"])
    # theirs is the mean's where a row does not exist, ours -inf
    lengths = options.get("query_seq_lengths", np.array([T, T]))
    rows = (np.arange(T) < np.asarray(lengths)[:, None])[..., None]
    assert np.isneginf(np.where(rows, -np.inf, got[1])).all()
    assert_close(np.where(rows, got[1], 0), np.where(rows, expected[1], 0), forward["lse"])
    for one, other, key in zip(got[2:5], expected[2:5], ("dq", "dk", "dv"), strict=True):
        assert_close(one, other, backward[key], factor=GRADIENT_FACTOR, name=key)
    if bias is not None:
        np.testing.assert_allclose(got[5], expected[5], atol=3e-6)


def test_half_precision_and_no_batch_axis() -> None:
    q, k, v, _ = arrays(dtype=jnp.bfloat16)
    out, residual = dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    assert (out.dtype, residual.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert residual.shape == (B, T, N)
    alone, rest = dot_product_attention(q[1], k[1], v[1], is_causal=True, return_residual=True)
    assert (alone.shape, rest.shape) == ((T, N, H), (T, N))
    assert (alone == out[1]).all()
    assert (rest == residual[1]).all()


def test_rows_without_keys_are_zero() -> None:
    """Where jax.nn gives the mean of the values, or lets a bias of -inf win over a mask."""
    q, k, v, _ = arrays()
    nothing = jnp.zeros((1, 1, T, S), bool)
    assert not dot_product_attention(q, k, v, mask=nothing).any()
    dead = jnp.full((1, 1, 1, S), -jnp.inf)
    some = jnp.arange(S)[None, None, None] < 3
    assert not dot_product_attention(q, k, v, bias=dead, mask=some).any()


def test_padding_may_hold_anything() -> None:
    q, k, v, dout = arrays()
    lengths = {
        "query_seq_lengths": jnp.array([5, T], jnp.int32),
        "key_value_seq_lengths": jnp.array([S, 6], jnp.int32),
    }

    def run(q: Any, k: Any, v: Any) -> Any:
        out, back = jax.vjp(lambda *x: dot_product_attention(*x, **lengths), q, k, v)
        return out, *back(dout)

    spoilt = run(q.at[0, 5:].set(jnp.nan), k.at[1, 6:].set(jnp.nan), v.at[1, 6:].set(jnp.inf))
    for one, other in zip(spoilt, run(q, k, v), strict=True):
        np.testing.assert_array_equal(one, other)


def test_windows() -> None:
    q, k, v, _ = arrays()
    same = dot_product_attention(q, k, v, is_causal=True)
    unlimited = dot_product_attention(q, k, v, is_causal=True, local_window_size=(-1, 0))
    assert (same == unlimited).all()
    # Without a causal mask a window counts from the same place.
    left = dot_product_attention(q, k, v, local_window_size=(2, 0))
    assert (left == dot_product_attention(q, k, v, is_causal=True, local_window_size=2)).all()
    with pytest.raises(ValueError, match="window"):
        dot_product_attention(q, k, v, local_window_size=(-2, 0))


def test_errors() -> None:
    q, k, v, _ = arrays()
    with pytest.raises(NotImplementedError, match="implementation"):
        dot_product_attention(q, k, v, implementation="cudnn")
    with pytest.raises(TypeError, match=r"mask\.dtype"):
        dot_product_attention(q, k, v, mask=jnp.zeros((1, 1, T, S)))
    with pytest.raises(TypeError, match=r"bias\.dtype"):
        dot_product_attention(q, k, v, bias=jnp.zeros((1, 1, T, S), jnp.int32))
    with pytest.raises(ValueError, match="head_dim"):
        dot_product_attention(q, k[..., :3], v)
