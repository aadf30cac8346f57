"""flashattn.torch: scaled_dot_product_attention on torch's own test samples and its documented
examples, the module, and the route from torch's function to ours.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import flashattn as fa
import pytest
import reference
import torch
from flashattn.torch import FlashAttention, route_sdpa, scaled_dot_product_attention
from tolerance import GRADIENT_FACTOR, assert_close
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch_numbers import (
    DTYPES,
    bshd,
    check_bhsd,
    missing,
    numbers,
    refused,
    tensors,
)
from yardstick import forward_yardstick, gradient_yardstick


def opinfo_samples(dtype: Any) -> list[Any]:
    pytest.importorskip("expecttest", reason="torch's test samples need the package expecttest")
    from torch.testing._internal.common_methods_invocations import (
        sample_inputs_scaled_dot_product_attention as samples,
    )

    return list(samples(None, "cpu", dtype, requires_grad=True))


def four_axes(lead: tuple[int, ...], tensor: Any) -> Any:
    """The tensor broadcast over `lead`, with exactly (batch, heads, seqlen, dim)."""
    wide = tensor.expand(*lead, *tensor.shape[-2:])
    return wide.unsqueeze(1) if len(lead) == 1 else wide.reshape(-1, *wide.shape[-3:])


def drawn_seed() -> int:
    """The seed that a call draws right after torch.manual_seed(5)."""
    torch.manual_seed(5)
    return int(torch.randint(0, 2**63 - 1, ()))


def options_of(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The oracle's options for torch's keywords."""
    opts: dict[str, Any] = {}
    if kwargs.get("is_causal"):
        opts["causal"] = "top_left"
    if kwargs.get("dropout_p"):
        opts |= {"dropout_p": kwargs["dropout_p"], "dropout_seed": drawn_seed()}
    if kwargs.get("attn_mask") is not None:
        opts["mask"] = numbers(kwargs["attn_mask"])
    if kwargs.get("scale") is not None:
        opts["scale"] = kwargs["scale"]
    return opts


def check_call(inputs: list[Any], kwargs: dict[str, Any]) -> None:
    """With four axes: output and gradients against the oracle. As given: the same bits, gradients
    summed over what was broadcast.
    """
    opts = options_of(kwargs)
    used = [name for name in ("mask", "dropout_p") if name in opts]
    if used and refused(lambda: scaled_dot_product_attention(*inputs, **kwargs), *used):
        return
    lead = tuple(torch.broadcast_shapes(*(x.shape[:-2] for x in inputs)))
    wide = [four_axes(lead, x.detach()).clone().requires_grad_() for x in inputs]
    mask = kwargs.get("attn_mask")
    masks = [mask] if mask is not None and mask.requires_grad else []
    torch.manual_seed(5)
    out = scaled_dot_product_attention(*wide, **kwargs)
    arrays = tuple(map(bshd, wide))
    exact = reference.attention(*arrays, **opts)
    assert_close(bshd(out), exact.out, forward_yardstick(arrays, opts)["out"])
    (dout,) = tensors(tuple(out.shape), dtype=out.dtype, seed=7)
    grads = reference.attention_backward(bshd(dout), *arrays, None, **opts)
    allowed = gradient_yardstick(bshd(dout), arrays, None, opts)
    found = torch.autograd.grad(out, [*wide, *masks], dout)
    for name, got in zip(("dq", "dk", "dv", "dmask"), found, strict=False):
        array = numbers(got) if name == "dmask" else bshd(got)
        factor = GRADIENT_FACTOR
        assert_close(array, getattr(grads, name), allowed[name], factor=factor, name=name)

    torch.manual_seed(5)
    given = scaled_dot_product_attention(*inputs, **kwargs)
    assert given.shape == (*lead, *out.shape[-2:])
    assert torch.equal(given.reshape(out.shape), out)
    again = torch.autograd.grad(given, [*inputs, *masks], dout.reshape(given.shape))
    for one, other, leaf in zip(again, found, [*inputs, *masks], strict=True):
        assert (one.dtype, one.shape) == (leaf.dtype, leaf.shape)
        summed = other if leaf is mask else other.reshape(*lead, *leaf.shape[-2:])
        assert torch.equal(one, summed.sum_to_size(leaf.shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", range(25))
def test_torchs_own_samples(dtype: Any, number: int) -> None:
    """Three and four axes, broadcast batches, causal with Tk > Tq, dropout, a mask."""
    samples = opinfo_samples(dtype)
    assert len(samples) == 25
    sample = samples[number]
    check_call([sample.input, *sample.args], sample.kwargs)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (2, 1, 1, 7), (3, 5, 7), (2, 3, 5, 1)])
def test_masks_broadcast(kind: str, shape: tuple[int, ...]) -> None:
    inputs = tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6), grad=True)
    (mask,) = tensors(shape, seed=3)
    mask = mask > -0.5 if kind == "bool" else mask.requires_grad_()
    check_call(inputs, {"attn_mask": mask})


def test_masks_of_many_batch_axes() -> None:
    """(2, 4) batches flatten; a mask over one of them is expanded, and its gradient summed back."""
    q, k, v = tensors((2, 4, 3, 5, 8), (2, 4, 3, 7, 8), (2, 4, 3, 7, 8))
    for shape in ((5, 7), (1, 3, 5, 7), (4, 1, 1, 7), (2, 1, 3, 5, 7)):
        (mask,) = tensors(shape, seed=3, grad=True)
        if refused(lambda m=mask: scaled_dot_product_attention(q, k, v, m), "mask"):
            continue
        out = scaled_dot_product_attention(q, k, v, mask)
        flat = [x.reshape(8, *x.shape[2:]) for x in (q, k, v)]
        whole = mask.expand(2, 4, 3, 5, 7).reshape(8, 3, 5, 7)
        expected = scaled_dot_product_attention(*flat, whole)
        assert torch.equal(out.reshape(expected.shape), expected)
        (got,) = torch.autograd.grad(out.square().sum(), mask)
        (wanted,) = torch.autograd.grad(expected.square().sum(), mask)
        assert torch.allclose(got, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_three_axes_with_a_mask() -> None:
    q, k, v = tensors((2, 5, 8), (2, 7, 8), (2, 7, 8))
    mask = tensors((2, 5, 7), seed=3)[0] > -0.5
    if refused(lambda: scaled_dot_product_attention(q, k, v, mask), "mask"):
        return
    out = scaled_dot_product_attention(q, k, v, mask)
    four = [x.unsqueeze(1) for x in (q, k, v)]
    assert torch.equal(out, scaled_dot_product_attention(*four, mask.unsqueeze(1)).squeeze(1))


def test_two_axes() -> None:
    q, k, v = tensors((5, 8), (7, 8), (7, 6))
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    four = [x[None, None] for x in (q, k, v)]
    assert torch.equal(out, scaled_dot_product_attention(*four, is_causal=True)[0, 0])


@pytest.mark.parametrize("kv_heads", [32, 8])
def test_documented_examples(kv_heads: int) -> None:
    """Those of torch's documentation, with fewer batch entries and heads in float16."""
    shapes = ((2, 32, 128, 64), (2, kv_heads, 128, 64), (2, kv_heads, 128, 64))
    inputs = tensors(*shapes, dtype=torch.float16)
    out = scaled_dot_product_attention(*inputs, enable_gqa=kv_heads != 32)
    exact = sdpa(*(x.double() for x in inputs), enable_gqa=True)
    check_bhsd(out, exact, inputs, {})


def test_different_value_dim_and_scale() -> None:
    inputs = tensors((4, 4, 3, 8), (4, 4, 6, 8), (4, 4, 6, 16), grad=True)
    check_call(inputs, {"is_causal": True, "scale": 0.3})


def test_signature_is_torchs() -> None:
    import inspect

    theirs = torch.ops.aten.scaled_dot_product_attention.default._schema.arguments
    ours = inspect.signature(scaled_dot_product_attention).parameters
    assert [x.name for x in theirs] == list(ours)
    for argument, parameter in zip(theirs, ours.values(), strict=True):
        assert argument.kwarg_only == (parameter.kind is parameter.KEYWORD_ONLY)
        default = argument.default_value if argument.has_default_value() else parameter.empty
        assert parameter.default == default


def test_errors_name_the_argument() -> None:
    q, k, v = tensors((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    with pytest.raises(ValueError, match="enable_gqa=True"):
        scaled_dot_product_attention(q, k, v)
    with pytest.raises(ValueError, match=r"query.ndim \(1\)"):
        scaled_dot_product_attention(q[0, 0, 0], k, v)
    with pytest.raises(TypeError, match="float64"):
        scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
    with pytest.raises(ValueError, match="head_dim"):
        scaled_dot_product_attention(q, k[..., :4], v, enable_gqa=True)
    with pytest.raises(ValueError, match="is_causal"):
        scaled_dot_product_attention(q, q, q, causal_lower_right(5, 5), is_causal=True)


@pytest.mark.parametrize("sizes", [(5, 7), (7, 7)])
def test_causal_biases(sizes: tuple[int, int]) -> None:
    rows, keys = sizes
    inputs = tensors((2, 3, rows, 8), (2, 3, keys, 8), (2, 3, keys, 8))
    upper = scaled_dot_product_attention(*inputs, causal_upper_left(rows, keys))
    assert torch.equal(upper, scaled_dot_product_attention(*inputs, is_causal=True))
    lower = scaled_dot_product_attention(*inputs, causal_lower_right(rows, keys))
    assert torch.equal(lower, fa.attention(*inputs, causal=True, layout="bhsd"))


def test_rows_without_keys_are_zero_as_torchs_are() -> None:
    q, k, v = tensors((1, 1, 3, 8), (1, 1, 4, 8), (1, 1, 4, 8))
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    if refused(lambda: scaled_dot_product_attention(q, k, v, mask), "mask"):
        return
    out = scaled_dot_product_attention(q, k, v, mask)
    assert torch.equal(out[0, 0, 1], torch.zeros(8))
    assert torch.equal(sdpa(q, k, v, mask)[0, 0, 1], torch.zeros(8))


def test_route() -> None:
    """Functions imported before, torch's modules, and gradients; outside everything is torch's."""
    q, k, v = tensors((2, 4, 9, 16), (2, 4, 9, 16), (2, 4, 9, 16), grad=True)
    ours = scaled_dot_product_attention(q, k, v, is_causal=True)
    theirs = sdpa(q, k, v, is_causal=True)
    assert not torch.equal(ours, theirs)
    with route_sdpa():
        assert torch.equal(sdpa(q, k, v, is_causal=True), ours)
        assert torch.equal(
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), ours
        )
        with pytest.raises(TypeError, match="float64"):
            sdpa(q.double(), k.double(), v.double())
    assert torch.equal(sdpa(q, k, v, is_causal=True), theirs)
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    (x,) = tensors((2, 6, 32))
    expected = layer(x, x, x, need_weights=False)[0]
    with route_sdpa():
        got = layer(x, x, x, need_weights=False)[0]
    assert got.grad_fn is not None
    assert torch.allclose(got, expected, rtol=0, atol=1e-6)


def test_module() -> None:
    q, k, v = tensors((2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16), grad=True)
    layer = FlashAttention(causal=True, window=(3, 0), dropout_p=0.5)
    assert repr(layer) == "FlashAttention(dropout_p=0.5, causal=True, window=(3, 0))"
    expected = fa.attention(q, k, v, causal=True, window=(3, 0))
    out, lse = layer.eval()(q, k, v, return_lse=True)
    assert torch.equal(out, expected)
    assert lse.shape == (2, 4, 9)
    assert not torch.equal(layer(q, k, v, window=(2, 0)), expected)
    if not refused(lambda: layer.train()(q, k, v), "dropout_p"):
        torch.manual_seed(5)
        dropped = layer.train()(q, k, v)
        opts = {"dropout_p": 0.5, "dropout_seed": drawn_seed()}
        assert torch.equal(dropped, fa.attention(q, k, v, causal=True, window=(3, 0), **opts))
    for name in ("mask", "windows"):
        with pytest.raises(TypeError, match=name):
            FlashAttention(**{name: None})


def test_module_has_parameters_and_buffers() -> None:
    sinks = torch.nn.Parameter(torch.zeros(4))
    layer = FlashAttention(sinks=sinks, alibi_slopes=torch.full((4,), 0.5))
    assert [name for name, _ in layer.named_parameters()] == ["sinks"]
    assert [name for name, _ in layer.named_buffers()] == ["alibi_slopes"]
    q, k, v = tensors((2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    if missing("sinks", "alibi_slopes"):
        return
    layer(q, k, v).square().sum().backward()
    opts = {"alibi_slopes": layer.alibi_slopes, "sinks": sinks.detach()}
    out, lse = fa.attention_forward(q, k, v, **opts)
    grads = fa.attention_backward(2 * out, q, k, v, out, lse, **opts)
    assert torch.equal(sinks.grad, grads.dsinks)


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import flashattn, sys; assert 'torch' not in sys.modules; import flashattn.torch;"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
