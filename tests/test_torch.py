"""torch tensors: values and gradients against torch's own attention in float64, autograd's rules.

Numbers are compared by the rule of docs/tolerances.md, or bit for bit with the numpy call, whose
numbers test_forward and test_backward hold against the oracle.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import flashattn as fa
import numpy as np
import pytest
import torch
from targets import chosen_backend
from torch.nn.functional import scaled_dot_product_attention
from torch_numbers import DTYPES, check_bhsd, check_gradients_bhsd, numbers, tensors

# (batch, heads, seqlen, dim): torch's layout
QKV = ((2, 4, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16))


def double(*inputs: Any) -> list[Any]:
    return [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, "top_left"])
def test_forward_and_gradients_against_torch(dtype: Any, causal: Any) -> None:
    inputs = tensors(*QKV, dtype=dtype, grad=True)
    exact = double(*inputs)
    out = fa.attention(*inputs, causal=causal, layout="bhsd")
    expected = scaled_dot_product_attention(*exact, is_causal=bool(causal), enable_gqa=True)
    assert (out.dtype, out.shape, out.device) == (dtype, expected.shape, inputs[0].device)
    (dout,) = tensors(tuple(out.shape), dtype=dtype)
    out.backward(dout)
    expected.backward(dout.double())
    opts = {"causal": causal}
    check_bhsd(out, expected, inputs, opts)
    got, truth = ([x.grad for x in leaves] for leaves in (inputs, exact))
    check_gradients_bhsd(got, truth, dout, inputs, opts)


def test_lse_is_differentiable() -> None:
    inputs = tensors(*QKV, grad=True)
    arrays = [numbers(x) for x in inputs]
    for use_out in (False, True):
        for x in inputs:
            x.grad = None
        out, lse = fa.attention(*inputs, return_lse=True, layout="bhsd")
        assert lse.dtype == torch.float32
        ((lse * lse).sum() + (out.sum() if use_out else 0)).backward()
        result, dlse = numbers(out), 2 * numbers(lse)
        dout = np.full_like(result, float(use_out))
        expected = fa.attention_backward(dout, *arrays, result, numbers(lse), dlse, layout="bhsd")
        for one, other in zip(inputs, expected[:3], strict=True):
            assert numbers(one.grad).tobytes() == other.tobytes()


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)])
def test_only_wanted_gradients(wanted: tuple[int, ...]) -> None:
    every = tensors(*QKV, grad=True)
    fa.attention(*every, layout="bhsd").sum().backward()
    some = tensors(*QKV)
    for x, want in zip(some, wanted, strict=True):
        x.requires_grad_(bool(want))
    fa.attention(*some, layout="bhsd").sum().backward()
    for x, full, want in zip(some, every, wanted, strict=True):
        assert torch.equal(x.grad, full.grad) if want else x.grad is None


def test_gradients_flow_through_the_graph() -> None:
    """Inputs that are no leaves, out used twice, and a chain of two calls."""
    x = tensors((1, 9, 2, 8), grad=True)[0]
    y = x.detach().clone().requires_grad_()

    def model(x: Any, attend: Any) -> Any:
        y = attend(x * 2, x + 1, x)
        z = attend(y, x, y)
        return (z * y).sum()

    class ByHand(torch.autograd.Function):
        """The same call, its gradient taken from the raw functions."""

        @staticmethod
        def forward(ctx: Any, *arrays: Any) -> Any:
            out, lse = fa.attention_forward(*arrays)
            ctx.save_for_backward(*arrays, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            return tuple(fa.attention_backward(dout, *ctx.saved_tensors)[:3])

    model(x, fa.attention).backward()
    model(y, ByHand.apply).backward()
    assert torch.equal(x.grad, y.grad)


def test_non_contiguous_inputs_and_gradients() -> None:
    base = tensors((2, 9, 3, 4, 16), grad=True)[0]  # fused qkv
    q, k, v = base.unbind(2)
    assert not q.is_contiguous()
    out = fa.attention(q, k, v, causal=True)
    weight = torch.randn(out.shape).transpose(1, 2).contiguous().transpose(1, 2)
    (out * weight).sum().backward()
    other = base.detach().clone().requires_grad_()
    packed = [x.contiguous() for x in other.unbind(2)]
    (fa.attention(*packed, causal=True) * weight).sum().backward()
    assert torch.equal(base.grad, other.grad)
    assert torch.equal(fa.attention(q, k, v).detach(), fa.attention(*packed).detach())


def test_expanded_gradient() -> None:
    """The gradient of sum() is one number with strides 0."""
    inputs = tensors(*QKV, grad=True)
    fa.attention(*inputs, layout="bhsd").sum().backward()
    again = tensors(*QKV, grad=True)
    out = fa.attention(*again, layout="bhsd")
    out.backward(torch.ones_like(out))
    assert torch.equal(inputs[0].grad, again[0].grad)


def test_double_backward_is_an_error() -> None:
    q, k, v = tensors(*QKV, grad=True)
    out = fa.attention(q, k, v, layout="bhsd")
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
def test_forward_mode_is_an_error() -> None:
    import torch.autograd.forward_ad as forward_ad

    q, k, v = tensors(*QKV)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="jvp"):
            fa.attention(dual, k, v, layout="bhsd")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
def test_dual_tensors_are_noticed_without_torchs_private_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from types import SimpleNamespace

    import torch.autograd.forward_ad as forward_ad
    from flashattn import _torch

    public = SimpleNamespace(unpack_dual=forward_ad.unpack_dual)
    monkeypatch.setattr(_torch, "forward_ad", public)
    q, k, v = tensors(*QKV)
    assert fa.attention(q, k, v, layout="bhsd").grad_fn is None
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="jvp"):
            fa.attention(dual, k, v, layout="bhsd")


def test_no_graph_without_need() -> None:
    q, k, v = tensors(*QKV, grad=True)
    with torch.no_grad():
        assert fa.attention(q, k, v, layout="bhsd").grad_fn is None
    with torch.inference_mode():
        fa.attention(q, k, v, layout="bhsd")
    assert fa.attention_forward(q, k, v, layout="bhsd")[0].grad_fn is None
    assert fa.attention(*tensors(*QKV), layout="bhsd").grad_fn is None
    assert fa.attention(q, k, v, layout="bhsd").grad_fn is not None


def test_changed_in_place_is_noticed() -> None:
    q, k, v = tensors(*QKV, grad=True)
    out = fa.attention(q, k, v, layout="bhsd")
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_out() -> None:
    q, k, v = tensors(*QKV)
    expected = fa.attention(q, k, v, layout="bhsd")
    out = torch.full_like(expected, float("nan"))
    assert fa.attention(q, k, v, layout="bhsd", out=out) is out
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="out must not be given where autograd records"):
        fa.attention(q.requires_grad_(), k, v, layout="bhsd", out=out)
    with pytest.raises(TypeError, match=r"attention: out \(ndarray\)"):
        fa.attention(q.detach(), k, v, layout="bhsd", out=out.numpy())


def test_same_bits_as_numpy() -> None:
    q, k, v = tensors(*QKV)
    out, lse = fa.attention_forward(q, k, v, layout="bhsd", causal=True)
    arrays = [x.numpy() for x in (q, k, v)]
    out2, lse2 = fa.attention_forward(*arrays, layout="bhsd", causal=True)
    assert np.array_equal(out.numpy(), out2)
    assert np.array_equal(lse.numpy(), lse2)


def test_parameters_and_subclasses() -> None:
    class Named(torch.Tensor):
        pass

    q, k, v = tensors(*QKV)
    expected = fa.attention(q, k, v, layout="bhsd")
    out = fa.attention(torch.nn.Parameter(q), k, v, layout="bhsd")
    assert torch.equal(out.detach(), expected)
    assert out.grad_fn is not None
    named = q.as_subclass(Named).requires_grad_()
    result = fa.attention(named, k, v, layout="bhsd")
    assert torch.equal(result.detach().as_subclass(torch.Tensor), expected)
    result.sum().backward()
    assert named.grad is not None


def test_negated_views_are_resolved() -> None:
    """A lazily negated view shares memory with its opposite: DLPack does not carry the bit."""
    z = torch.randn(1, 9, 2, 8, dtype=torch.complex64)
    negated = z.conj().imag
    assert negated.is_neg()
    fa.copy_stats(reset=True)
    out = fa.attention(negated, negated, negated)
    assert torch.equal(out, fa.attention(*[negated.resolve_neg()] * 3))
    assert fa.copy_stats()[chosen_backend()].copied_bytes == 3 * 9 * 2 * 8 * 4


def test_default_dtype_and_device_do_not_matter() -> None:
    inputs = tensors(*QKV, dtype=torch.bfloat16)
    torch.set_default_dtype(torch.float64)
    try:
        out, lse = fa.attention_forward(*inputs, layout="bhsd")
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        with torch.device("meta"):
            assert fa.attention(*inputs, layout="bhsd").device.type == "cpu"
    finally:
        torch.set_default_dtype(torch.float32)


def test_deterministic_gradients() -> None:
    shapes = ((2, 200, 4, 16), (2, 200, 2, 16), (2, 200, 2, 16))
    results = []
    for _ in range(3):
        inputs = tensors(*shapes, grad=True)
        fa.attention(*inputs, causal=True).square().sum().backward()
        results.append([x.grad for x in inputs])
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


def test_dropout_seed_comes_from_torch() -> None:
    """Without a seed the differentiable call draws one, before a backend can refuse dropout."""
    q, k, v = tensors(*QKV)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    try:
        fa.attention(q, k, v, layout="bhsd", dropout_p=0.5)
    except NotImplementedError as error:
        assert "dropout" in str(error)  # noqa: PT017 - a backend may lack dropout
    assert not torch.equal(before, torch.get_rng_state())


def test_torch_is_not_imported_for_numpy() -> None:
    code = (
        "import sys, numpy as np, flashattn as fa\n"
        "q = np.ones((1, 2, 1, 8), np.float32)\n"
        "fa.attention(q, q, q)\n"
        "assert not {'torch', 'jax', 'mlx', 'ml_dtypes', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_other_frameworks_arrays_are_refused_where_autograd_records() -> None:
    (query,) = tensors(QKV[1], grad=True)
    numpy = {"mask": (9, 9), "alibi_slopes": (2,), "sinks": (2,)}
    for name, shape in numpy.items():
        with pytest.raises(
            TypeError, match=rf"attention: {name} \(ndarray\) must be a torch tensor"
        ):
            fa.attention(query, query, query, layout="bhsd", **{name: np.zeros(shape, np.float32)})
    key = np.zeros((1, 9, 2, 16), np.float32)
    with pytest.raises(TypeError, match=r"attention: query \(ndarray\) must be a torch tensor"):
        fa.attention(key, key, key, mask=torch.zeros(9, 9, requires_grad=True))
