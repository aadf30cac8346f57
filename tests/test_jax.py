"""JAX arrays: numbers and gradients of every option against the oracle, and JAX's transforms.

What a transform gives is held, bit for bit, against the plain call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flashattn as fa
import numpy as np
import pytest
from cases import Problem, build, check_gradients, check_result
from framework_cases import ARRAYS, CASES
from reference import Gradients

jax = pytest.importorskip("jax")
jnp = jax.numpy

from flashattn import _jax  # noqa: E402 - needs jax


def arrays(problem: Problem) -> tuple[list[Any], dict[str, Any]]:
    """The problem's differentiable arrays, named where they are options, and its other options."""
    others = {n: x for n, x in problem.options.items() if n not in ARRAYS}
    named = {n: jnp.asarray(problem.options[n]) for n in ARRAYS if n in problem.options}
    return [*map(jnp.asarray, problem.inputs), named], others


def attend(others: dict[str, Any]) -> Callable[..., Any]:
    def call(query: Any, key: Any, value: Any, named: dict[str, Any]) -> Any:
        return fa.attention(query, key, value, return_lse=True, **named, **others)

    return call


def same(one: Any, other: Any) -> bool:
    """All leaves, bit for bit; NaN is itself."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def random(*shapes: tuple[int, ...], seed: int = 0) -> list[Any]:
    generator = np.random.default_rng(seed)
    return [jnp.asarray(generator.standard_normal(shape, np.float32)) for shape in shapes]


QKV = ((2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 8))


@pytest.mark.parametrize("name", list(CASES))
def test_numbers(name: str) -> None:
    """Under jit, against the oracle: out, lse and every gradient, with a gradient of lse."""
    problem = build(CASES[name])
    inputs, others = arrays(problem)

    @jax.jit
    def run(inputs: Any, dout: Any, dlse: Any) -> Any:
        results, back = jax.vjp(attend(others), *inputs)
        return results, back((dout, dlse))

    (out, lse), (dq, dk, dv, named) = run(
        inputs, jnp.asarray(problem.dout), jnp.asarray(problem.dlse)
    )
    check_result(problem, out, lse)
    if CASES[name].mask == "bool":
        named["mask"] = None
    found = (dq, dk, dv, *(named.get(option) for option in ARRAYS))
    check_gradients(problem, Gradients(*(None if x is None else np.asarray(x) for x in found)))


@pytest.mark.parametrize("name", list(CASES))
def test_the_bits_of_numpy(name: str) -> None:
    """Eager calls, raw ones included, give the bits of the same call on numpy arrays."""
    problem = build(CASES[name])
    inputs, others = arrays(problem)
    *tensors, named = inputs
    out, lse = fa.attention_forward(*problem.inputs, **problem.options)
    expected = fa.attention_backward(
        problem.dout, *problem.inputs, out, lse, problem.dlse, **problem.options
    )
    assert same(attend(others)(*inputs), (out, lse))
    assert same(fa.attention_forward(*tensors, **named, **others), (out, lse))
    results = (jnp.asarray(out), jnp.asarray(lse))
    found = fa.attention_backward(
        jnp.asarray(problem.dout), *tensors, *results, jnp.asarray(problem.dlse), **named, **others
    )
    assert same(tuple(found), tuple(expected))
    assert [x is None for x in found] == [x is None for x in expected]
    assert all(isinstance(x, jax.Array) for x in found if x is not None)
    _, back = jax.vjp(attend(others), *inputs)
    dq, dk, dv, _ = back((jnp.asarray(problem.dout), jnp.asarray(problem.dlse)))
    assert same((dq, dk, dv), tuple(expected)[:3])


def test_layout_and_packed_sequences() -> None:
    q, k, v = random(*QKV)
    heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]
    out = fa.attention(*heads_first, causal=True, layout="bhsd")
    assert same(out.swapaxes(1, 2), fa.attention(q, k, v, causal=True))
    packed = [x.reshape(18, *x.shape[2:]) for x in (q, k, v)]
    lengths = jnp.array([0, 4, 4, 15])

    def call(*tensors: Any) -> Any:
        return fa.attention_varlen(*tensors, lengths, lengths, causal=True)

    found = jax.jit(lambda *t: jax.vjp(call, *t))(*packed)[0]
    expected = fa.attention_varlen(
        *map(np.asarray, packed), *[np.asarray(lengths)] * 2, causal=True
    )
    assert same(found, expected)
    grads = jax.grad(lambda *t: call(*t)[0].sum(), argnums=(0, 1, 2))(*packed)
    ones = np.ones_like(expected[0])
    plain = fa.attention_varlen_backward(
        ones, *map(np.asarray, packed), *expected, *[np.asarray(lengths)] * 2, causal=True
    )
    assert same(grads, tuple(plain)[:3])


def test_only_the_gradients_asked_for_are_computed() -> None:
    q, k, v = random(*QKV)
    (mask,) = random((1, 1, 9, 9))

    def loss(q: Any, v: Any, mask: Any) -> Any:
        return fa.attention(q, k, v, mask=mask).sum()

    def results(*argnums: int) -> str:
        text = str(jax.make_jaxpr(jax.grad(loss, argnums=argnums))(q, v, mask))
        return text.split("'results', '")[-1].partition("'")[0]

    assert results(0) == "dq"
    assert results(2) == "dmask"
    assert results(0, 1) == "dq dv"
    # No gradient of lse arrives, and none is made up.
    assert "dlse" not in str(jax.make_jaxpr(jax.grad(loss))(q, v, mask))


def test_gradients_have_the_dtype_of_their_inputs() -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in random(*QKV))
    (mask,) = (x.astype(jnp.bfloat16) for x in random((9, 9)))
    grads = jax.grad(lambda q, m: fa.attention(q, k, v, mask=m).sum(), argnums=(0, 1))(q, mask)
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 2
    assert grads[1].shape == mask.shape


def test_vmap() -> None:
    """Each example has the bits that it has alone; shared arguments stay shared."""
    q, k, v = random((3, 2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 3, 2, 8))

    def call(q: Any, k: Any, v: Any) -> Any:
        return fa.attention(q, k, v, causal=True, window=(3, 0))

    out = jax.vmap(call, in_axes=(0, None, 2), out_axes=1)(q, k, v)
    for n in range(3):
        assert same(out[:, n], call(q[n], k, v[:, :, n]))
    nested = jax.jit(jax.vmap(jax.vmap(call, in_axes=(0, None, None)), in_axes=(None, None, 2)))
    assert same(nested(q, k, v)[1][2], call(q[2], k, v[:, :, 1]))


def test_vmap_of_gradients_and_options() -> None:
    q, k, v = random(*QKV)
    masks, sinks = random((3, 9, 9), (3, 4))
    lengths = jnp.array([[9, 4], [1, 2], [0, 9]])
    offsets, seeds = jnp.arange(3), jax.random.split(jax.random.key(5), 3)

    def loss(q: Any, mask: Any, sinks: Any, lengths: Any, offset: Any, seed: Any) -> Any:
        options = {"kv_lengths": lengths, "causal": True, "q_offset": offset, "mask": mask}
        drawn = {"dropout_p": 0.4, "dropout_seed": seed, "sinks": sinks}
        return (fa.attention(q, k, v, **options, **drawn) ** 2).sum()

    each = jax.value_and_grad(loss, argnums=(0, 1, 2))
    arguments = (masks, sinks, lengths, offsets, seeds)
    found = jax.vmap(each, in_axes=(None, 0, 0, 0, 0, 0))(q, *arguments)
    for n in range(3):
        alone = each(q, *(x[n] for x in arguments))
        # The sum of the loss is XLA's, whose order may differ; what is ours may not.
        np.testing.assert_allclose(found[0][n], alone[0], rtol=1e-5)
        assert same(jax.tree.map(lambda x, n=n: x[n], found[1]), alone[1])


def test_dropout_seeds() -> None:
    """A key, its words and the int that they are draw alike where they are the same bits."""
    q, k, v = random(*QKV)

    def call(seed: Any) -> Any:
        return fa.attention(q, k, v, dropout_p=0.5, dropout_seed=seed)

    words = jnp.array([7, 2**31 + 3], jnp.uint32)
    number = 7 | (2**31 + 3) << 32
    plain = fa.attention(*map(np.asarray, (q, k, v)), dropout_p=0.5, dropout_seed=number)
    assert same(call(number), plain)
    assert same(call(words), plain)
    assert same(jax.jit(call)(words), plain)
    key = jax.random.key(3)
    assert same(call(key), jax.jit(call)(key))
    assert same(call(key), call(jax.random.bits(key, (2,), "uint32")))
    assert not same(call(key), call(jax.random.key(4)))
    assert same(call(jnp.int32(-1)), call(2**64 - 1))
    with pytest.raises(ValueError, match="dropout_seed"):
        fa.attention(q, k, v, dropout_p=0.5)
    with pytest.raises(TypeError, match="dropout_seed"):
        call(jnp.zeros(3))


def test_numbers_that_change_are_no_new_program() -> None:
    q, k, v = random(*QKV)
    traced = []

    @jax.jit
    def call(q: Any, offset: Any, seed: Any, head: Any) -> Any:
        traced.append(1)
        shard = fa.DropoutShard(8, head, 20, offset, 20, 0)
        options = {"dropout_shard": shard, "dropout_p": 0.3, "dropout_seed": seed}
        return fa.attention(q, k, v, causal=True, q_offset=offset, k_offset=offset - 2, **options)

    tensors = tuple(map(np.asarray, (q, k, v)))
    for offset, seed, head in ((0, 1, 4), (3, 2, 0)):
        shard = fa.DropoutShard(8, head, 20, offset, 20, 0)
        options = {"dropout_shard": shard, "dropout_p": 0.3, "dropout_seed": seed}
        numbers = {"q_offset": offset, "k_offset": offset - 2}
        plain = fa.attention(*tensors, causal=True, **numbers, **options)
        assert same(call(q, offset, seed, head), plain)
    assert len(traced) == 1


def test_scan_and_checkpoint() -> None:
    q, k, _ = random(*QKV)

    def step(q: Any, offset: Any) -> Any:
        out = fa.attention(q, k, q[..., :2, :], causal=True, q_offset=offset)
        return out, out.sum()

    def chain(q: Any) -> Any:
        return jax.lax.scan(step, q, jnp.arange(3))[0]

    def unrolled(q: Any) -> Any:
        for offset in range(3):
            q = step(q, offset)[0]
        return q

    assert same(chain(q), unrolled(q))
    plain = jax.grad(lambda q: unrolled(q).sum())(q)
    for other in (jax.checkpoint(chain), jax.checkpoint(unrolled), jax.jit(chain)):
        assert same(jax.grad(lambda q, f=other: f(q).sum())(q), plain)


def test_merge() -> None:
    """Parts over disjoint keys merge to the whole, with its gradients; dead parts add nothing."""
    q, k, v = random((2, 7, 4, 16), (2, 12, 4, 16), (2, 12, 4, 16))

    def whole(q: Any, k: Any, v: Any) -> Any:
        return fa.attention(q, k, v, return_lse=True)

    def parts(q: Any, k: Any, v: Any) -> Any:
        ends = ((0, 5), (5, 12))
        pairs = [whole(q, k[:, a:b], v[:, a:b]) for a, b in ends]
        pairs.append((jnp.full_like(pairs[0][0], jnp.nan), jnp.full_like(pairs[0][1], -jnp.inf)))
        return fa.merge_attention(*map(list, zip(*pairs, strict=True)))

    cotangents = random((2, 7, 4, 16), (2, 4, 7), seed=1)
    for one, other in zip(
        *(
            jax.tree.leaves((f(q, k, v), jax.vjp(f, q, k, v)[1](tuple(cotangents))))
            for f in (whole, jax.jit(parts))
        ),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, atol=2e-6)
    numpy_parts = [np.asarray(x) for x in random((2, 2, 3, 8), (2, 3, 2))]
    merged = fa.merge_attention(*([jnp.asarray(x)] * 2 for x in numpy_parts))
    for one, other in zip(merged, fa.merge_attention(*([x] * 2 for x in numpy_parts)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    dead = fa.merge_attention([jnp.full((1, 2, 1, 4), jnp.nan)], [jnp.full((1, 1, 2), -jnp.inf)])
    assert not np.asarray(dead[0]).any()
    assert np.isneginf(dead[1]).all()
    out, lse = fa.attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match=r"lses\[0\]\.shape"):
        fa.merge_attention([out], [lse], layout="bhsd")
    with pytest.raises(TypeError, match=r"outs\[1\]\.dtype"):
        fa.merge_attention([out, out.astype(jnp.float16)], [lse] * 2)


def test_errors_at_trace_time() -> None:
    q, k, v = random(*QKV)
    with pytest.raises(ValueError, match=r"key.head_dim \(3\) must equal query.head_dim \(16\)"):
        jax.eval_shape(fa.attention, q, k[..., :3], v)
    with pytest.raises(TypeError, match=r"key\.dtype"):
        fa.attention(q.astype(jnp.float16), k, v)
    with pytest.raises(TypeError, match=r"query\.dtype"):
        fa.attention(*(x.astype(jnp.int32) for x in (q, k, v)))
    with pytest.raises(TypeError, match=r"mask\.dtype"):
        fa.attention(q, k, v, mask=jnp.zeros((9, 9), jnp.int32))
    with pytest.raises(ValueError, match=r"mask\.shape"):
        fa.attention(q, k, v, mask=jnp.zeros((3, 9)))
    with pytest.raises(TypeError, match="unknown option"):
        fa.attention(q, k, v, colour=3)
    with pytest.raises(TypeError, match="out must not be given"):
        fa.attention(q, k, v, out=q)
    with pytest.raises(ValueError, match="window"):
        fa.attention(q, k, v, window=(-2, 0))
    with pytest.raises(TypeError, match="must be an int"):
        fa.attention(q, k, v, k_offset=1.5)
    with pytest.raises(TypeError, match="must be an int"):
        fa.attention(q, k, v, k_offset=jnp.float32(1))
    with pytest.raises(TypeError, match="DropoutShard"):
        fa.attention(q, k, v, dropout_shard=(1, 2))
    with pytest.raises(ValueError, match=r"dropout_shard\.head_start"):
        fa.attention(q, k, v, dropout_shard=fa.DropoutShard(4, 1, 9, 0, 9, 0))
    with pytest.raises(ValueError, match="int32"):
        fa.attention(q, k, v, kv_lengths=[2**40, 1])
    with pytest.raises(ValueError, match="abacus"):
        fa.attention(q, k, v, backend="abacus")


def test_errors_of_values_are_the_runtimes() -> None:
    q, k, v = random(*QKV)
    with pytest.raises(RuntimeError, match=r"kv_lengths\[1\] \(10\) must be between 0 and 9"):
        jax.block_until_ready(fa.attention(q, k, v, kv_lengths=[1, 10]))
    # The runtime goes on.
    assert same(fa.attention(q, k, v, kv_lengths=[9, 9]), fa.attention(q, k, v))


def test_calls_that_are_not_ours_are_errors() -> None:
    """The handlers believe nothing that a program says of its arrays."""
    q, k, v = random(*QKV)
    shapes = (jax.ShapeDtypeStruct((2, 9, 4, 8), np.float32),)
    shapes += (jax.ShapeDtypeStruct((2, 4, 9), np.float32),)
    words = jnp.zeros((10, 2), jnp.uint32)
    qkv, results = {"operands": "query key value"}, {"results": "out lse"}
    wrong: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "2 buffers must be query key value": ((q, k), qkv | results),
        "2 buffers must be out": ((q, k, v), qkv | {"results": "out"}),
        "must have a query": ((q, k, v), {"operands": "a b c"} | results),
        "operands has another kind": ((q, k, v), {"operands": 3} | results),
        r"query\.ndim \(3\) must be 4": ((q[0], k, v), qkv | results),
        r"lse\.shape must begin as query's": ((q[None, None], k, v), qkv | results),
        r"key\.shape must begin as query's": ((q[None], jnp.stack([k] * 3), v), qkv | results),
        "numbers must be uint32": (
            (q, k, v, words[1:]),
            {"operands": "query key value numbers"} | results,
        ),
        r"mask\.dtype \(XLA type 6\)": (
            (q, k, v, jnp.zeros((1, 1, 9, 9), jnp.uint8)),
            {"operands": "query key value mask"} | results,
        ),
        "attribute window_left must be int64": (
            (q, k, v),
            qkv | results | {"window_left": np.int32(3)},
        ),
        "attribute scale must be float64": ((q, k, v), qkv | results | {"scale": np.float32(3)}),
        r"value\.ndim": ((q, k), {"operands": "query key"} | results),
    }
    for text, (operands, attributes) in wrong.items():
        call = jax.ffi.ffi_call(_jax._FORWARD_TARGET, shapes, vmap_method="expand_dims")
        with pytest.raises(RuntimeError, match=text):
            jax.block_until_ready(call(*operands, **attributes))


def test_no_second_derivative() -> None:
    q, k, v = random(*QKV)

    def loss(q: Any) -> Any:
        return (fa.attention(q, k, v) ** 2).sum()

    with pytest.raises(RuntimeError, match="second derivative"):
        jax.grad(lambda q: jax.grad(loss)(q).sum())(q)
    with pytest.raises(RuntimeError, match="second derivative"):
        jax.hessian(loss)(q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (q,), (q,))
    with pytest.raises(RuntimeError, match="attention_forward is not differentiable"):
        jax.grad(lambda q: fa.attention_forward(q, k, v)[0].sum())(q)


def test_empty_arrays() -> None:
    q, k, v = random((2, 3, 4, 16), (2, 0, 2, 16), (2, 0, 2, 8))
    out, lse = fa.attention(q, k, v, return_lse=True)
    assert not np.asarray(out).any()
    assert np.isneginf(lse).all()
    grads = jax.grad(lambda *t: fa.attention(*t).sum(), argnums=(0, 1, 2))(q, k, v)
    assert not np.asarray(grads[0]).any()
    assert fa.attention(q[:, :0], q[:, :, :2], q[:, :, :2]).shape == (2, 0, 4, 16)
    assert jax.vmap(fa.attention)(*(x[None, :, :3][:0] for x in (q, q, q))).shape[0] == 0


def test_with_64_bit_types() -> None:
    q, k, v = random(*QKV)
    expected = fa.attention(q, k, v, causal=True, q_offset=2, kv_lengths=[5, 9])
    with jax.enable_x64(True):
        lengths = jnp.array([5, 9])
        assert lengths.dtype == np.int64
        found = jax.jit(fa.attention, static_argnames="causal")(
            q, k, v, causal=True, q_offset=2, kv_lengths=lengths
        )
        assert same(found, expected)
        mask = jnp.zeros((9, 9), np.float64)
        assert jax.grad(lambda m: fa.attention(q, k, v, mask=m).sum())(mask).dtype == np.float64
        seeded = fa.attention(q, k, v, dropout_p=0.5, dropout_seed=jnp.uint64(2**63 + 5))
        with pytest.raises(TypeError, match=r"query\.dtype"):
            fa.attention(*(x.astype(np.float64) for x in (q, k, v)))
    assert same(seeded, fa.attention(q, k, v, dropout_p=0.5, dropout_seed=2**63 + 5))


def test_many_threads() -> None:
    """Several calls at a time, from XLA's threads; each has the bits that it has alone."""
    q, k, v = random((1, 200, 4, 32), (1, 200, 4, 32), (1, 200, 4, 32))
    call = jax.jit(jax.value_and_grad(lambda q, k, v: fa.attention(q, k, v, causal=True).sum()))
    expected = call(q, k, v)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: call(q, k, v), range(24)))
    assert all(same(result[1], expected[1]) for result in results)


def test_python_runs_meanwhile() -> None:
    """The handler neither holds nor needs the GIL."""
    shape = (1, 2048, 8, 64)
    q, k, v = random(shape, shape, shape)
    call = jax.jit(fa.attention)
    jax.block_until_ready(call(q, k, v))
    turns = 0
    done = threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    before = turns
    jax.block_until_ready(call(q, k, v))
    ran = turns - before
    done.set()
    thread.join()
    assert ran >= 3
