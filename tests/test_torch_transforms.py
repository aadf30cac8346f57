"""torch's transforms and modes: vmap, func.grad, autocast, determinism, checkpoints, dispatch
modes and tensor subclasses.

Each result is held, bit for bit, against the plain call, whose numbers test_torch.py checks.
"""

from __future__ import annotations

from typing import Any

import flashattn as fa
import numpy as np
import pytest
import torch
from flashattn import _torch_ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch_numbers import missing, refused, tensors
from torch_options import PACKED, PLAIN, QKV, attend, gradients, option_sets, same


def test_vmap() -> None:
    """Each example has the bits that it has alone; shared arguments stay shared."""
    q, k, v = tensors((3, 2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 3, 2, 8))
    out = torch.vmap(attend, in_dims=(0, None, 2), out_dims=1)(q, k, v)
    for n in range(3):
        assert torch.equal(out[:, n], attend(q[n], k, v[:, :, n]))


def test_vmap_of_raw_calls() -> None:
    q, k, v = tensors((3, 2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 8))

    def call(q: Any) -> Any:
        out, lse = fa.attention_forward(q, k, v)
        return out, lse, *fa.attention_backward(out, q, k, v, out, lse)[:3]

    batched, alone = torch.vmap(call)(q), call(q[2])
    assert same([x[2] for x in batched], alone)


def test_vmap_of_options() -> None:
    """Numbers of numpy, sequences and arrays that are no tensors, as the plain call takes them."""
    (q,) = tensors((3, 2, 9, 4, 16))
    opts: dict[str, Any] = {"causal": True, "q_offset": np.int64(2), "kv_lengths": [9, 4]}
    for more in ({}, {"q_offset": [0, 3]}, {"kv_lengths": np.array([2, 8])}, {"scale": 1}):
        given = {**opts, **more}
        out = torch.vmap(lambda x, given=given: fa.attention(x, x, x, **given))(q)
        assert torch.equal(out[1], fa.attention(q[1], q[1], q[1], **given))


def test_vmap_of_dropout() -> None:
    q, k, v = tensors((3, 2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 8))
    if missing("dropout_p"):
        return

    def call(q: Any) -> Any:
        return fa.attention(q * 0, k, v, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(call)(q)
    shared = torch.vmap(call, randomness="same")(q)
    assert torch.equal(shared[0], shared[1])
    own = torch.vmap(call, randomness="different")(q)
    assert not torch.equal(own[0], own[1])


def test_func_grad() -> None:
    """Also per example, and the second derivative is refused there too."""
    q, k, v = tensors(*QKV)
    leaves = tensors(*QKV, grad=True)
    expected = gradients(attend(*leaves), *leaves)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v).square().sum()

    assert same(torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v), expected)
    many = torch.stack([q, 2 * q])
    each = torch.vmap(torch.func.grad(loss), in_dims=(0, None, None))(many, k, v)
    assert torch.equal(each[0], expected[0])
    assert torch.equal(each[1], torch.func.grad(loss)(2 * q, k, v))
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.func.jacrev(torch.func.grad(loss))(q, k, v)


def test_double_backward_of_the_operator_is_an_error() -> None:
    q, k, v = tensors(*QKV, grad=True)
    out, _ = _torch_ops.dispatch("attention", q, k, v, PLAIN)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: Any) -> None:
    """As for torch's own attention: query, key and value in the autocast dtype, slopes not."""
    inputs = tensors(*QKV, grad=True)
    slopes = torch.full((4,), 1 / 3)
    opts = {} if missing("alibi_slopes") else {"alibi_slopes": slopes}
    with torch.autocast("cpu", dtype):
        out = fa.attention(*inputs, **opts)
        mixed = fa.attention(inputs[0].to(dtype), *inputs[1:], **opts)
        with pytest.raises(TypeError, match="float64"):
            fa.attention(*(x.double() for x in inputs))
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs)
        (packed, _) = fa.attention_varlen(*tensors(*PACKED), [0, 9], [0, 9])
    half = [x.to(dtype) for x in inputs]
    expected = fa.attention(*half, **opts)
    assert out.dtype == compiled.dtype == packed.dtype == dtype
    assert same([out, mixed, compiled], [expected, expected, attend(*half)])
    found = gradients(out, *inputs)
    assert [x.dtype for x in found] == [torch.float32] * 3
    assert same(found, gradients(expected, *inputs))


def test_deterministic_mode() -> None:
    inputs = tensors(*QKV, grad=True)
    expected = attend(*inputs)
    torch.use_deterministic_algorithms(True)
    try:
        out = attend(*inputs)
        found = gradients(out, *inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(out, expected)
    assert same(found, gradients(expected, *inputs))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_checkpoint(reentrant: bool, dropout_p: float) -> None:
    """The recomputed call draws the seed of the first, because torch restores its generator."""
    inputs = tensors(*QKV, grad=True)

    def call(*inputs: Any) -> Any:
        return fa.attention(*inputs, causal=True, dropout_p=dropout_p).square()

    if dropout_p and refused(lambda: call(*inputs), "dropout_p"):
        return
    torch.manual_seed(3)
    expected = torch.autograd.grad(call(*inputs).sum(), inputs)
    torch.manual_seed(3)
    checkpoint(call, *inputs, use_reentrant=reentrant).sum().backward()
    assert same([x.grad for x in inputs], expected)


@pytest.mark.parametrize("name", ["mask", "alibi_slopes", "sinks"])
def test_gradient_of_an_option_alone(name: str) -> None:
    """query, key and value need none, and none is computed for them."""
    q, k, v = tensors(*QKV)
    opts = option_sets()[name]
    if refused(lambda: fa.attention(q, k, v, **opts), name):
        return
    leaf = opts[name]
    out = fa.attention(q, k, v, **opts)
    (got,) = gradients(out, leaf)
    plain = {name: leaf.detach()}
    result, lse = fa.attention_forward(q, k, v, **plain)
    grads = fa.attention_backward(2 * result, q, k, v, result, lse, **plain)
    assert torch.equal(got, getattr(grads, f"d{name}"))


def test_dispatch_modes_see_one_operator() -> None:
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    inputs = tensors(*QKV)
    with Recorder():
        out = attend(*inputs)
    assert torch.equal(out, attend(*inputs))
    assert torch.ops.flashattn.forward.default in seen


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in tensors(*QKV))
        out, lse = fa.attention(q, k, v, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 9, 4, 8), (2, 4, 9), torch.float32)


def test_unknown_options_are_refused_while_tracing() -> None:
    q, k, v = tensors(*QKV)
    with pytest.raises(TypeError, match="attention: unknown option 'window_size'"):
        torch.vmap(lambda q: fa.attention(q, k, v, window_size=3))(q[None])
    with pytest.raises(ValueError, match="causal"):
        torch.vmap(lambda q: fa.attention(q, k, v, causal="left"))(q[None])
    with pytest.raises(ValueError, match="out must not be given"):
        torch.vmap(lambda q: fa.attention(q, k, v, out=q))(q[None])
