"""torch.compile, torch.export and opcheck: one operator, every option, and no break of the graph.

Each result is held, bit for bit, against the plain call, whose numbers test_torch.py checks.
"""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import flashattn as fa
import pytest
import torch
from flashattn import _torch_ops
from flashattn.torch import route_sdpa
from torch_numbers import missing, refused, tensors
from torch_options import PACKED, QKV, attend, gradients, option_sets, same


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


@pytest.mark.parametrize("name", ["none", "mask", "sinks", "dropout_p"])
def test_compile_raw_calls(name: str) -> None:
    """attention_forward and attention_backward by hand, which record nothing."""
    opts = option_sets()[name]
    inputs = tensors(*QKV, grad=True)
    if missing(name):
        return

    def call(q: Any, k: Any, v: Any, opts: Any) -> Any:
        out, lse = fa.attention_forward(q, k, v, **opts)
        return out, lse, *fa.attention_backward(2 * out, q, k, v, out, lse, lse, **opts)

    torch.compiler.reset()
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs, opts)
    expected = call(*inputs, opts)
    assert [x is None for x in got] == [x is None for x in expected]
    assert not any(x is not None and x.requires_grad for x in got)
    assert same(*([x for x in results if x is not None] for results in (got, expected)))


def test_compile_raw_packed_calls() -> None:
    inputs = tensors(*PACKED)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)

    def call(q: Any, k: Any, v: Any, cu: Any) -> Any:
        out, lse = fa.attention_varlen(q, k, v, cu, cu)
        return fa.attention_varlen_backward(out, q, k, v, out, lse, cu, cu)[:3]

    torch.compiler.reset()
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs, cu)
    assert same(got, call(*inputs, cu))


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


@pytest.mark.parametrize(
    "use",
    [
        "torch.compile(attend, fullgraph=True, backend='aot_eager')(q)",
        "torch.vmap(attend)(q[None])",
        "torch.func.grad(lambda x: attend(x).sum())(q)",
    ],
)
def test_first_use_of_torch(use: str) -> None:
    """The operators are made where the first call comes from, inside a trace too."""
    code = (
        "import torch, flashattn\n"
        "def attend(x):\n    return flashattn.attention(x, x, x)\n"
        f"q = torch.ones(1, 3, 2, 8)\n{use}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
