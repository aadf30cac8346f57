"""The functions of the flash_attn package: its signatures, and its own grid of shapes and rules
(head kinds, causal, local, ALiBi, softcap, dropout, lengths of 1 to 1024) against the oracle.
"""

from __future__ import annotations

import inspect
from typing import Any

import flashattn as fa
import numpy as np
import pytest
import reference
import reference_packed
import torch
from tolerance import GRADIENT_FACTOR, assert_close
from torch_numbers import missing, numbers, refused, tensors
from yardstick import forward_yardstick, gradient_yardstick

COMMON = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
RAW = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
SIGNATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "flash_attn_func": ("q k v", COMMON),
    "flash_attn_qkvpacked_func": ("qkv", COMMON),
    "flash_attn_kvpacked_func": ("q kv", COMMON),
    "flash_attn_varlen_func": (f"q k v {LENGTHS}", {**COMMON, "block_table": None}),
    "flash_attn_varlen_qkvpacked_func": ("qkv cu_seqlens max_seqlen", COMMON),
    "flash_attn_varlen_kvpacked_func": (f"q kv {LENGTHS}", COMMON),
    "flash_attn_with_kvcache": (
        "q k_cache v_cache",
        {
            "k": None,
            "v": None,
            "rotary_cos": None,
            "rotary_sin": None,
            "cache_seqlens": None,
            "cache_batch_idx": None,
            "cache_leftpad": None,
            "block_table": None,
            "softmax_scale": None,
            "causal": False,
            "window_size": (-1, -1),
            "softcap": 0.0,
            "rotary_interleaved": True,
            "alibi_slopes": None,
            "num_splits": 0,
            "return_softmax_lse": False,
        },
    ),
    "_flash_attn_forward": (f"q k v {RAW} return_softmax", {}),
    "_flash_attn_backward": (
        f"dout q k v out softmax_lse dq dk dv {RAW} deterministic",
        {"rng_state": None},
    ),
    "flash_attn_combine": ("out_partial lse_partial", {"out": None, "out_dtype": None}),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_upstreams(name: str) -> None:
    required, defaults = SIGNATURES[name]
    parameters = inspect.signature(getattr(fa, name)).parameters
    assert list(parameters) == [*required.split(), *defaults]
    for parameter in parameters.values():
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        assert parameter.default == defaults.get(parameter.name, parameter.empty)


# seqlen_q, seqlen_k, head_dim, kv_heads of 6, upstream's options
GRID: list[tuple[int, int, int, int, dict[str, Any]]] = [
    (113, 203, 32, 6, {}),
    (128, 217, 59, 1, {"causal": True}),
    (113, 211, 40, 2, {"window_size": (31, 7)}),
    (108, 256, 64, 6, {"causal": True, "window_size": (64, 3)}),
    (256, 200, 96, 2, {"causal": True}),
    (64, 128, 111, 1, {"softcap": 5.0}),
    (128, 64, 128, 6, {"causal": True, "softcap": 50.0}),
    (127, 128, 160, 2, {"causal": True, "alibi_slopes": "heads"}),
    (128, 127, 192, 6, {"alibi_slopes": "batch", "window_size": (20, 20)}),
    (64, 64, 224, 1, {"causal": True, "dropout_p": 0.17}),
    (99, 143, 256, 2, {"dropout_p": 0.17, "alibi_slopes": "heads", "softcap": 30.0}),
    (1, 239, 64, 2, {"causal": True}),
    (3, 1024, 128, 6, {"causal": True}),
    (1, 1, 8, 6, {"softmax_scale": 0.7}),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
NAMES = {"softmax_scale": "scale", "window_size": "window"}


def slopes(kind: str) -> Any:
    shape = (6,) if kind == "heads" else (2, 6)
    return 0.05 + 0.3 * torch.rand(shape, generator=torch.Generator().manual_seed(1))


def upstream(opts: dict[str, Any]) -> dict[str, Any]:
    kind = opts.get("alibi_slopes")
    return opts if kind is None else {**opts, "alibi_slopes": slopes(kind)}


def ours(opts: dict[str, Any], seed: int | None = None) -> dict[str, Any]:
    """The oracle's options for upstream's."""
    found = {NAMES.get(name, name): value for name, value in opts.items()}
    if seed is not None and found.get("dropout_p"):
        found["dropout_seed"] = seed
    return {n: numbers(x) if isinstance(x, torch.Tensor) else x for n, x in found.items()}


def drawn_seed() -> int:
    torch.manual_seed(5)
    return int(torch.randint(0, 2**63 - 1, ()))


def used(opts: dict[str, Any]) -> list[str]:
    return [n for n in ("softcap", "alibi_slopes", "dropout_p") if n in opts]


def check_gradients(found: Any, grads: Any, allowed: dict[str, float]) -> None:
    for name, got in zip(("dq", "dk", "dv"), found, strict=True):
        exact = getattr(grads, name)
        assert_close(numbers(got), exact, allowed[name], factor=GRADIENT_FACTOR, name=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", range(len(GRID)))
def test_grid(dtype: Any, number: int) -> None:
    rows, keys, dim, kv_heads, raw = GRID[number]
    opts = upstream(raw)
    inputs = tensors((2, rows, 6, dim), *[(2, keys, kv_heads, dim)] * 2, dtype=dtype, grad=True)
    if used(opts) and refused(lambda: fa.flash_attn_func(*inputs, **opts), *used(opts)):
        return
    options = ours(opts, drawn_seed())
    torch.manual_seed(5)
    out, lse, _ = fa.flash_attn_func(*inputs, **opts, return_attn_probs=True)
    arrays = tuple(map(numbers, inputs))
    exact, allowed = reference.attention(*arrays, **options), forward_yardstick(arrays, options)
    assert_close(numbers(out), exact.out, allowed["out"])
    assert_close(numbers(lse), exact.lse, allowed["lse"], name="lse")
    (dout,) = tensors(tuple(out.shape), dtype=dtype, seed=7)
    grads = reference.attention_backward(numbers(dout), *arrays, None, **options)
    limits = gradient_yardstick(numbers(dout), arrays, None, options)
    check_gradients(torch.autograd.grad(out, inputs, dout), grads, limits)
    torch.manual_seed(5)
    assert torch.equal(fa.flash_attn_func(*inputs, **opts), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_projections(dtype: Any) -> None:
    """qkv and kv in one array: the same bits, the gradient in one array."""
    opts: dict[str, Any] = {"causal": True, "window_size": (40, 0), "softmax_scale": 0.2}
    (qkv,) = tensors((2, 97, 3, 6, 32), dtype=dtype, grad=True)
    q, k, v = (x.detach().clone().requires_grad_() for x in qkv.unbind(2))
    kv = torch.stack([k, v], 2).detach().requires_grad_()
    expected = fa.flash_attn_func(q, k, v, **opts)
    (dout,) = tensors(tuple(expected.shape), dtype=dtype, seed=7)
    dq, dk, dv = torch.autograd.grad(expected, (q, k, v), dout)
    one = fa.flash_attn_qkvpacked_func(qkv, **opts)
    two = fa.flash_attn_kvpacked_func(q, kv, **opts)
    assert torch.equal(one, expected)
    assert torch.equal(two, expected)
    assert torch.equal(torch.autograd.grad(one, qkv, dout)[0], torch.stack([dq, dk, dv], 2))
    found = torch.autograd.grad(two, (q, kv), dout)
    assert torch.equal(found[0], dq)
    assert torch.equal(found[1], torch.stack([dk, dv], 2))
    array = numbers(qkv)
    assert np.array_equal(fa.flash_attn_qkvpacked_func(array, **opts), numbers(one))
    with pytest.raises(ValueError, match=r"flash_attn_qkvpacked_func: qkv.shape"):
        fa.flash_attn_qkvpacked_func(qkv[:, :, :2])


CU_Q, CU_K = (0, 1, 1, 60, 113), (0, 77, 90, 90, 203)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"causal": True},
        {"window_size": (15, 4)},
        {"causal": True, "softcap": 4.0, "alibi_slopes": "heads"},
        {"causal": True, "dropout_p": 0.17},
    ],
    ids=lambda raw: "-".join(raw) or "plain",
)
def test_varlen_grid(dtype: Any, raw: dict[str, Any]) -> None:
    opts = upstream(raw)
    inputs = tensors((113, 6, 59), (203, 2, 59), (203, 2, 59), dtype=dtype, grad=True)
    cu = [torch.tensor(x, dtype=torch.int32) for x in (CU_Q, CU_K)]
    call = (*inputs, *cu, 59, 113)
    if used(opts) and refused(lambda: fa.flash_attn_varlen_func(*call, **opts), *used(opts)):
        return
    options = ours(opts, drawn_seed())
    torch.manual_seed(5)
    out, lse, _ = fa.flash_attn_varlen_func(*call, **opts, return_attn_probs=True)
    arrays = tuple(map(numbers, inputs))
    exact, exact_lse = reference_packed.attention_varlen(*arrays, CU_Q, CU_K, **options)
    # The yardstick is the plain error of one problem of all rows and keys.
    whole = tuple(x[None] for x in arrays)
    plain = {n: x for n, x in options.items() if not n.startswith("dropout")}
    allowed = forward_yardstick(whole, plain)
    assert_close(numbers(out), exact, allowed["out"])
    assert_close(numbers(lse), exact_lse, allowed["lse"], name="lse")
    assert lse.shape == (6, 113)
    kv = torch.stack(inputs[1:], 1)
    torch.manual_seed(5)
    again = fa.flash_attn_varlen_kvpacked_func(inputs[0], kv, *cu, 59, 113, **opts)
    assert torch.equal(again, out)


def test_varlen_gradients_and_packed_projection() -> None:
    (qkv,) = tensors((113, 3, 6, 32), grad=True)
    q, k, v = (x.detach().clone().requires_grad_() for x in qkv.unbind(1))
    cu = torch.tensor(CU_Q, dtype=torch.int32)
    one = fa.flash_attn_varlen_qkvpacked_func(qkv, cu, 59, causal=True)
    two = fa.flash_attn_varlen_func(q, k, v, cu, cu, 59, 59, causal=True)
    assert torch.equal(one, two)
    (dout,) = tensors(tuple(one.shape), seed=7)
    found = torch.autograd.grad(two, (q, k, v), dout)
    packed = torch.autograd.grad(one, qkv, dout)[0]
    assert torch.equal(packed, torch.stack(found, 1))
    out, lse = fa.attention_varlen(q, k, v, cu, cu, causal=True)
    raw = fa.attention_varlen_backward(dout, q, k, v, out, lse, cu, cu, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(found, raw[:3], strict=True))


def test_varlen_pages() -> None:
    """Keys in pages by block_table: the bits of the same keys in a row."""
    q, k, v = tensors((9, 6, 16), (24, 2, 16), (24, 2, 16))
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    pages = [torch.full((4, 8, 2, 16), float("nan")) for _ in range(2)]
    for page, x in zip(pages, (k, v), strict=True):
        page[2], page[0, :4], page[1], page[3, :4] = x[:8], x[8:12], x[12:20], x[20:24]
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ((0, 4, 9), (0, 12, 24)))
    expected = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 12, causal=True)
    got = fa.flash_attn_varlen_func(q, *pages, cu_q, cu_k, 5, 12, causal=True, block_table=table)
    assert torch.equal(got, expected)


def test_attention_probabilities() -> None:
    """S_dmask: the softmax, negative where dropped; without dropout nothing, as upstream."""
    inputs = tensors((2, 33, 6, 16), (2, 300, 2, 16), (2, 300, 2, 16))
    out, _, nothing = fa.flash_attn_func(*inputs, return_attn_probs=True)
    assert torch.equal(out, fa.flash_attn_func(*inputs))
    assert nothing.shape == (0,)
    opts: dict[str, Any] = {"causal": True, "dropout_p": 0.25}
    if refused(lambda: fa.flash_attn_func(*inputs, **opts), "dropout_p"):
        return
    out, _, signed = fa.flash_attn_func(*inputs, **opts, return_attn_probs=True)
    assert signed.shape == (2, 6, 33, 300)
    arrays = [x.double() for x in inputs]
    k, v = (x.repeat_interleave(3, 2) for x in arrays[1:])
    scores = torch.einsum("bihd,bjhd->bhij", arrays[0], k) / 4
    visible = torch.ones(33, 300, dtype=torch.bool).tril(300 - 33)
    expected = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    assert torch.allclose(signed.abs().double(), expected, rtol=0, atol=2e-6)
    kept = torch.where(signed > 0, signed.double(), 0.0) / 0.75
    whole = torch.einsum("bhij,bjhd->bihd", kept, v)
    assert torch.allclose(out.double(), whole, rtol=0, atol=2e-6)
    assert abs(float((signed[..., visible] < 0).double().mean()) - 0.25) < 0.01


def test_attention_probabilities_of_packed_sequences() -> None:
    q, k, v = tensors((20, 6, 16), (30, 2, 16), (30, 2, 16))
    cu_q, cu_k = [0, 8, 8, 20], [0, 11, 20, 30]
    if refused(lambda: fa.flash_attn_func(q[None], k[None], v[None], 0.5), "dropout_p"):
        return
    cu = [torch.tensor(x, dtype=torch.int32) for x in (cu_q, cu_k)]
    out, _, signed = fa.flash_attn_varlen_func(q, k, v, *cu, 12, 11, 0.5, return_attn_probs=True)
    assert signed.shape == (3, 6, 12, 11)
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        kept = signed[b, :, : rows.stop - rows.start, : keys.stop - keys.start].clamp(min=0) * 2
        whole = torch.einsum("hij,jhd->ihd", kept, v[keys].repeat_interleave(3, 1))
        assert torch.allclose(out[rows], whole, rtol=0, atol=2e-6)


def test_raw_forward_and_backward() -> None:
    """rng_state carries dropout's seed from one to the other; gradients are written in place."""
    inputs = tensors((2, 33, 6, 16), (2, 47, 2, 16), (2, 47, 2, 16))
    p = 0.0 if refused(lambda: fa.flash_attn_func(*inputs, 0.3), "dropout_p") else 0.3
    options = (p, 0.3, True, 20, 0, 0.0, None)
    torch.manual_seed(5)
    out, lse, signed, state = fa._flash_attn_forward(*inputs, *options, False)
    assert (signed.shape, state.dtype, state.shape) == ((0,), torch.int64, (2,))
    leaves = [x.clone().requires_grad_() for x in inputs]
    torch.manual_seed(5)
    expected = fa.flash_attn_func(*leaves, p, 0.3, True, (20, 0))
    assert torch.equal(out, expected)
    (dout,) = tensors(tuple(out.shape), seed=7)
    found = torch.autograd.grad(expected, leaves, dout)
    # Strided and absent places to write.
    dq = torch.full((2, 6, 33, 16), torch.nan).transpose(1, 2)
    dv = torch.full_like(inputs[2], torch.nan)
    delta = fa._flash_attn_backward(
        dout, *inputs, out, lse, dq, None, dv, *options, True, rng_state=state
    )
    assert torch.equal(dq, found[0])
    assert torch.equal(dv, found[2])
    assert torch.allclose(delta, (dout * out).sum(-1).transpose(1, 2))
    with pytest.raises(ValueError, match="rng_state"):
        fa._flash_attn_backward(dout, *inputs, out, lse, dq, None, dv, 0.3, *options[1:], True)


def test_numpy_arrays() -> None:
    """The forward functions give numpy callers the bits that torch callers get."""
    q, k, v = tensors((2, 9, 6, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    opts: dict[str, Any] = {"causal": True, "return_attn_probs": True}
    if not missing("dropout_p"):
        opts["dropout_p"] = 0.3
    cu = torch.tensor([0, 4, 18], dtype=torch.int32)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    kv = torch.stack([k, v], 2)
    out, lse = fa.attention_forward(q, k, v)
    parts = (torch.stack([out, out]), torch.stack([lse, lse]).transpose(-1, -2))
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (fa.flash_attn_func, (q, k, v), opts),
        (fa.flash_attn_kvpacked_func, (q, kv), opts),
        (fa.flash_attn_varlen_func, (*packed, cu, cu, 14, 14), opts),
        (fa.flash_attn_with_kvcache, (q, k, v), {"return_softmax_lse": True}),
        (fa.flash_attn_combine, parts, {}),
    ]
    for function, arguments, keywords in calls:
        found = []
        for convert in (lambda x: x, lambda x: x.numpy() if isinstance(x, torch.Tensor) else x):
            torch.manual_seed(5)
            np.random.seed(5)  # noqa: NPY002 - the generator that draws numpy's seeds
            found.append(function(*map(convert, arguments), **keywords))
        assert all(isinstance(x, np.ndarray) for x in found[1])
        if "dropout_p" in keywords:  # each framework draws its own seed
            assert [x.shape for x in found[1]] == [tuple(x.shape) for x in found[0]]
            weights = [np.abs(np.asarray(x[2])) for x in found]
            assert np.array_equal(*weights)
        else:
            assert all(np.array_equal(a.numpy(), b) for a, b in zip(*found, strict=True))


def test_compiles() -> None:
    inputs = tensors((2, 9, 6, 16), (2, 9, 2, 16), (2, 9, 2, 16), grad=True)
    cu = torch.tensor([0, 4, 18], dtype=torch.int32)

    def call(q: Any, k: Any, v: Any, cu: Any) -> Any:
        dense = fa.flash_attn_func(q, k, v, causal=True, window_size=(4, -1))
        packed = [x.flatten(0, 1) for x in (q, k, v)]
        return dense, fa.flash_attn_varlen_func(*packed, cu, cu, 14, 14, causal=True)

    torch.compiler.reset()
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs, cu)
    assert all(torch.equal(a, b) for a, b in zip(got, call(*inputs, cu), strict=True))
