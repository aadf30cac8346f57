"""torch's ways of looking into a call: compile, export, opcheck, vmap, func.grad, autocast,
deterministic mode, checkpointing, dispatch modes and tensor subclasses.

Each result is held, bit for bit, against the plain call, whose numbers test_torch.py checks.
"""

from __future__ import annotations

import io
from typing import Any

import flashattn as fa
import pytest
import torch
from flashattn import _torch_ops
from flashattn.torch import route_sdpa
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch_numbers import missing, refused, tensors

QKV = ((2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 8))
PLAIN = {"causal": True, "window": (3, 0), "scale": 0.2}
PACKED = ((9, 4, 16), (9, 2, 16), (9, 2, 8))


def attend(q: Any, k: Any, v: Any) -> Any:
    return fa.attention(q, k, v, causal=True, window=(3, 0), scale=0.2)


def gradients(out: Any, *inputs: Any) -> tuple[Any, ...]:
    return torch.autograd.grad(out.square().sum(), inputs)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def option_sets() -> dict[str, dict[str, Any]]:
    """Every option once, by the name that a backend may lack."""
    slopes, sinks = tensors((4,), (4,), seed=4, grad=True)
    (mask,) = tensors((2, 1, 9, 9), seed=5, grad=True)
    lengths = torch.tensor([9, 5], dtype=torch.int32)
    return {
        "none": {},
        "window": PLAIN,
        "kv_lengths": {"kv_lengths": lengths, "causal": "top_left", "k_offset": 2, "q_offset": 1},
        "q_offset": {"q_offset": torch.tensor([0, 3]), "causal": True, "layout": "bshd"},
        "mask": {"mask": mask},
        "softcap": {"softcap": 2.0},
        "alibi_slopes": {"alibi_slopes": slopes},
        "sinks": {"sinks": sinks},
        "dropout_p": {
            "dropout_p": 0.3,
            "dropout_seed": 2**64 - 3,
            "dropout_offset": 2**63,
            "dropout_shard": fa.DropoutShard(8, 4, 20, 3, 30, 5),
        },
    }


@pytest.mark.parametrize("name", list(option_sets()))
def test_compile(name: str) -> None:
    """fullgraph: no option may break the graph. Output, lse and all gradients."""
    opts = option_sets()[name]
    inputs = tensors(*QKV, grad=True)

    def call(q: Any, k: Any, v: Any, opts: Any) -> Any:
        return fa.attention(q, k, v, return_lse=True, **opts)

    if refused(lambda: call(*inputs, opts), name):
        return
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected, got = call(*inputs, opts), compiled(*inputs, opts)
    assert same(got, expected)
    leaves = [*inputs, *(x for x in opts.values() if getattr(x, "requires_grad", False))]
    found = [
        torch.autograd.grad(out.square().sum() + lse.sum(), leaves) for out, lse in (expected, got)
    ]
    assert same(*found)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_compile_with_the_default_backend() -> None:
    inputs = tensors(*QKV, grad=True)
    torch.compiler.reset()
    got = torch.compile(attend, fullgraph=True)(*inputs)
    expected = attend(*inputs)
    assert torch.equal(got, expected)
    dout = torch.ones_like(got)
    assert same(torch.autograd.grad(got, inputs, dout), torch.autograd.grad(expected, inputs, dout))


def test_compile_with_changing_lengths() -> None:
    """One graph serves every length and offset."""
    torch.compiler.reset()
    graphs = torch._dynamo.testing.CompileCounter()

    def step(q: Any, k: Any, position: int) -> Any:
        return fa.attention(q, k, k, causal="top_left", q_offset=position)

    compiled = torch.compile(step, fullgraph=True, backend=graphs, dynamic=True)
    for rows, keys in ((3, 5), (4, 7), (5, 11)):
        q, k = tensors((2, rows, 4, 8), (2, keys, 2, 8))
        assert torch.equal(compiled(q, k, keys - rows), step(q, k, keys - rows))
    assert graphs.frame_count == 1


def test_compile_packed_sequences() -> None:
    inputs = tensors(*PACKED, grad=True)
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)

    def call(q: Any, k: Any, v: Any, cu: Any) -> Any:
        return fa.attention_varlen(q, k, v, cu, cu, causal=True)

    torch.compiler.reset()
    expected = call(*inputs, cu_seqlens)
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs, cu_seqlens)
    assert same(got, expected)
    assert same(gradients(got[0], *inputs), gradients(expected[0], *inputs))


def test_compile_routes_torchs_attention() -> None:
    q = tensors((2, 4, 9, 16))[0]

    def call(q: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    torch.compiler.reset()
    with route_sdpa():
        got = torch.compile(call, fullgraph=True, backend="aot_eager")(q)
    assert torch.equal(got, fa.attention(q, q, q, causal="top_left", layout="bhsd"))


def test_compiled_dropout_draws_anew() -> None:
    """A seed is drawn at each run, from torch's generator, and the backward pass has the same."""
    q, k, v = tensors(*QKV)
    v = torch.ones_like(v).requires_grad_()

    def call(q: Any, k: Any, v: Any) -> Any:
        return fa.attention(q, k, v, dropout_p=0.5)

    if refused(lambda: call(q, k, v), "dropout_p"):
        return
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    first, second = compiled(q, k, v), compiled(q, k, v)
    torch.manual_seed(1)
    assert torch.equal(compiled(q, k, v), first)
    torch.manual_seed(1)
    plain = call(q, k, v)
    assert torch.equal(plain, first)
    assert not torch.equal(first, second)
    assert same(gradients(first, v), gradients(plain, v))


@pytest.mark.parametrize("name", list(option_sets()))
def test_opcheck(name: str) -> None:
    """torch's own test of an operator: schema, fake kernel, autograd, tracing with AOT."""
    opts = option_sets()[name]
    inputs = tensors(*QKV, grad=True)
    if missing(name):
        return
    arguments = (*inputs, *_torch_ops.pack("attention", opts))
    torch.library.opcheck(torch.ops.flashattn.forward.default, arguments)
    out, lse = torch.ops.flashattn.forward(*arguments)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in (out, lse, *arguments)]
    floating = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in plain[2:8]]
    torch.library.opcheck(
        torch.ops.flashattn.backward.default,
        (plain[0], None, *plain[:2], floating, *plain[2:]),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_opcheck_packed() -> None:
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "causal": True}
    arguments = (*tensors(*PACKED, grad=True), *_torch_ops.pack("attention_varlen", packed))
    torch.library.opcheck(torch.ops.flashattn.forward.default, arguments)


class Model(torch.nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    """The program holds one operator, serves other lengths, and survives being saved."""
    inputs = tensors(*QKV)
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        Model(), tuple(inputs), dynamic_shapes=({1: length},) * 3, strict=strict
    )
    named = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert named.count(torch.ops.flashattn.forward.default) == 1
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    longer = tensors((2, 17, 4, 16), (2, 17, 2, 16), (2, 17, 2, 8))
    for one in (inputs, longer):
        assert torch.equal(loaded(*one), attend(*one))


def test_vmap() -> None:
    """Each example has the bits that it has alone; shared arguments stay shared."""
    q, k, v = tensors((3, 2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 3, 2, 8))
    out = torch.vmap(attend, in_dims=(0, None, 2), out_dims=1)(q, k, v)
    for n in range(3):
        assert torch.equal(out[:, n], attend(q[n], k, v[:, :, n]))


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
