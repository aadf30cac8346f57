"""MLX arrays: numbers and gradients of every option against the oracle, and MLX's transforms."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import flashattn as fa
import framework_cases
import ml_dtypes
import numpy as np
import pytest
from cases import Problem, build, check_gradients, check_result
from framework_cases import ARRAYS
from reference import Gradients
from tolerance import assert_close
from yardstick import forward_yardstick

mx = pytest.importorskip("mlx.core")

from flashattn.mlx import scaled_dot_product_attention  # noqa: E402 - needs mlx

CASES = {
    name: framework_cases.CASES[name]
    for name in ("plain", "float16", "bfloat16", "offset per entry", "bool mask")
}
CASES["everything"] = replace(framework_cases.CASES["everything"], mask="additive_keys")


def to_mlx(array: Any) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


def numbers(array: Any) -> Any:
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(array)


def arrays(problem: Problem) -> tuple[list[Any], list[str], dict[str, Any]]:
    """The differentiable arrays, the names of those that are options, and the other options."""
    others = {n: x for n, x in problem.options.items() if n not in ARRAYS}
    names = [n for n in ARRAYS if n in problem.options]
    given = [*problem.inputs, *(problem.options[n] for n in names)]
    return [to_mlx(x) for x in given], names, others


def random(*shapes: tuple[int, ...], seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [mx.array(rng.standard_normal(shape, np.float32)) for shape in shapes]


QKV = ((2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 8))


@pytest.mark.parametrize("name", list(CASES))
def test_numbers(name: str) -> None:
    """Against the oracle: out, lse and every gradient, with a gradient of lse; raw calls too."""
    problem = build(CASES[name])
    given, names, others = arrays(problem)

    def call(*given: Any) -> Any:
        named = dict(zip(names, given[3:], strict=True))
        return fa.attention(*given[:3], return_lse=True, **named, **others)

    cotangents = [to_mlx(problem.dout), to_mlx(problem.dlse)]
    (out, lse), found = mx.vjp(call, given, cotangents)
    check_result(problem, numbers(out), numbers(lse))
    by_name = dict(zip(names, found[3:], strict=True))
    if CASES[name].mask == "bool":
        by_name["mask"] = None
    full = (*found[:3], *(by_name.get(n) for n in ARRAYS))
    check_gradients(problem, Gradients(*(None if x is None else numbers(x) for x in full)))
    named = dict(zip(names, given[3:], strict=True))
    raw = fa.attention_forward(*given[:3], **named, **others)
    assert all(mx.array_equal(x, y).item() for x, y in zip(raw, (out, lse), strict=True))
    grads = fa.attention_backward(cotangents[0], *given[:3], *raw, cotangents[1], **named, **others)
    for x, y in zip(grads, full, strict=True):
        assert (x is None) == (y is None)
        assert x is None or mx.array_equal(x, y).item()


def test_packed_sequences_and_merge() -> None:
    q, k, v = (x.reshape(18, *x.shape[2:]) for x in random(*QKV))
    ends = [0, 4, 4, 15]
    out, lse = fa.attention_varlen(q, k, v, ends, ends, causal=True)
    plain = fa.attention_varlen(*map(np.array, (q, k, v)), ends, ends, causal=True)
    np.testing.assert_array_equal(np.array(out), plain[0])
    np.testing.assert_array_equal(np.array(lse), plain[1])
    grad = mx.grad(lambda q: fa.attention_varlen(q, k, v, ends, ends, causal=True)[0].sum())(q)
    dq = fa.attention_varlen_backward(
        np.ones_like(plain[0]), *map(np.array, (q, k, v)), *plain, ends, ends, causal=True
    ).dq
    np.testing.assert_array_equal(np.array(grad), dq)
    merged = fa.merge_attention([out, out], [lse, lse])
    assert isinstance(merged[0], mx.array)


def test_grad_and_checkpoint() -> None:
    q, k, v = random(*QKV)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return fa.attention(q * 2, k, v, causal=True).square().sum()

    value, grads = mx.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)
    again = mx.grad(mx.checkpoint(loss), argnums=(0, 1, 2))(q, k, v)
    assert all(mx.array_equal(x, y).item() for x, y in zip(grads, again, strict=True))
    step = 1e-2 * mx.random.normal(q.shape, key=mx.random.key(0))
    change = (loss(q + step, k, v) - loss(q - step, k, v)).item() / 2
    assert change == pytest.approx((grads[0] * step).sum().item(), rel=1e-2)
    assert value.item() > 0


def test_inputs_that_are_not_computed_yet() -> None:
    q, k, v = random(*QKV)
    out = fa.attention(q + 1, mx.swapaxes(mx.swapaxes(k, 1, 2), 1, 2), v[:, ::-1][:, ::-1])
    assert mx.array_equal(out, fa.attention(q + 1, k, v)).item()
    assert isinstance(out, mx.array)


def test_dropout() -> None:
    q, k, v = random(*QKV)
    key = mx.random.key(11)
    low, high = key.tolist()
    one = fa.attention(q, k, v, dropout_p=0.5, dropout_seed=key)
    assert mx.array_equal(one, fa.attention(q, k, v, dropout_p=0.5, dropout_seed=low | high << 32))
    drawn = []
    for seed in (1, 1, 2):
        mx.random.seed(seed)
        drawn.append(fa.attention(q, k, v, dropout_p=0.5))
    assert mx.array_equal(drawn[0], drawn[1]).item()
    assert not mx.array_equal(drawn[0], drawn[2]).item()
    with pytest.raises(TypeError, match="dropout_seed"):
        fa.attention(q, k, v, dropout_p=0.5, dropout_seed=mx.zeros(2))
    with pytest.raises(ValueError, match="dropout_seed"):
        fa.attention_forward(q, k, v, dropout_p=0.5)


def test_what_mlx_cannot_trace_is_refused() -> None:
    """As the docstring of flashattn.mlx says."""
    q, k, v = random(*QKV)

    def call(q: Any) -> Any:
        return fa.attention(q, k, v)

    for transform in (mx.compile(call), mx.vmap(call)):
        with pytest.raises(ValueError, match="eval an array during function transformations"):
            transform(q)


def test_derivatives_that_do_not_exist_are_errors() -> None:
    q, k, v = random(*QKV)

    def loss(q: Any) -> Any:
        return fa.attention(q, k, v).square().sum()

    with pytest.raises(RuntimeError, match="second derivative"):
        mx.grad(lambda q: mx.grad(loss)(q).sum())(q)
    with pytest.raises(RuntimeError, match="forward mode"):
        mx.jvp(loss, [q], [q])
    with pytest.raises(RuntimeError, match="not differentiable"):
        mx.grad(lambda q: fa.attention_forward(q, k, v)[0].sum())(q)


def test_errors() -> None:
    q, k, v = random(*QKV)
    with pytest.raises(ValueError, match=r"key\.head_dim"):
        fa.attention(q, k[..., :3], v)
    with pytest.raises(TypeError, match=r"key\.dtype"):
        fa.attention(q, k.astype(mx.float16), v)
    with pytest.raises(TypeError, match="out must not be given"):
        fa.attention(q, k, v, out=q)
    with pytest.raises(TypeError, match="unknown option"):
        fa.attention(q, k, v, colour=3)
    with pytest.raises(ValueError, match="causal"):
        scaled_dot_product_attention(q, k, v, scale=1.0, mask="diagonal")
    with pytest.raises(TypeError, match="framework of query"):
        fa.attention(q, np.array(k), v)


def test_the_signature_is_mx_fasts() -> None:
    ours = inspect.signature(scaled_dot_product_attention).parameters
    text = mx.fast.scaled_dot_product_attention.__doc__.partition(")")[0]
    for name in ours:
        assert f"{name}:" in text
    assert text.count(":") == len(ours)


# Batch, seqlen_q, seqlen_k, head_dim, heads, kv_heads: the kinds of shapes that MLX's own tests of
# mx.fast run: squares, vectors against caches, ragged lengths, grouped heads, odd dimensions.
SHAPES = [
    (1, 1, 32, 64, 8, 8),
    (2, 1, 129, 128, 8, 2),
    (1, 63, 63, 24, 3, 1),
    (1, 65, 31, 80, 2, 2),
    (2, 128, 192, 64, 4, 2),
    (1, 7, 257, 256, 2, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "additive", "sinks"])
def test_mx_fast(shape: tuple[int, ...], kind: str) -> None:
    """mx.fast's function against ours, within what each may be from float64."""
    batch, rows, columns, dim, heads, kv_heads = shape
    q, k, v = random(
        (batch, heads, rows, dim), (batch, kv_heads, columns, dim), (batch, kv_heads, columns, dim)
    )
    if kind == "causal" and rows > columns:
        pytest.skip("MLX gives rows without keys other values")
    rng = np.random.default_rng(1)
    allowed = rng.random((rows, columns)) < 0.7
    allowed[:, 0] = True
    options: dict[str, Any] = {
        "none": {},
        "causal": {"mask": "causal"},
        "bool": {"mask": mx.array(allowed)},
        "additive": {"mask": random((1, heads, rows, columns))[0]},
        "sinks": {"sinks": mx.array(rng.standard_normal(heads).astype(np.float32))},
    }[kind]
    out = scaled_dot_product_attention(q, k, v, scale=dim**-0.5, **options)
    theirs = mx.fast.scaled_dot_product_attention(q, k, v, scale=dim**-0.5, **options)
    plain = tuple(np.array(x).swapaxes(1, 2) for x in (q, k, v))
    yardstick = forward_yardstick(plain, {})["out"]
    # Two float32 results, each as far from the truth as it may be.
    assert_close(np.array(out), np.array(theirs), 2 * yardstick)


def test_mixed_dtypes_are_promoted() -> None:
    q, k, v = (mx.swapaxes(x, 1, 2) for x in random(*QKV))
    out = scaled_dot_product_attention(q.astype(mx.bfloat16), k, v, scale=0.25)
    assert out.dtype == mx.float32
    half = [x.astype(mx.bfloat16) for x in (q, k, v)]
    assert scaled_dot_product_attention(*half, scale=0.25, mask="causal").dtype == mx.bfloat16
    sinks = mx.zeros(4, mx.float16)

    def loss(sinks: Any) -> Any:
        return scaled_dot_product_attention(*half, scale=0.25, sinks=sinks).sum()

    assert mx.grad(loss)(sinks).dtype == mx.float16
