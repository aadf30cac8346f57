"""attention_kvcache and merge_attention where torch traces or dispatches: operators without a break
of the graph, gradients of merges, clear refusals.

Each result is held, bit for bit, against the plain call, whose numbers test_kvcache.py and
test_merge.py check.
"""

from __future__ import annotations

from typing import Any

import flashattn as fa
import pytest
import torch
from flashattn import _torch_cache_ops, _torch_merge_ops  # noqa: F401 - defines the operators
from flashattn._torch_ops import pack
from torch.utils.checkpoint import checkpoint
from torch_numbers import tensors
from torch_options import same

CACHE = ((2, 1, 4, 16), (2, 20, 2, 16), (2, 20, 2, 8))
NEW = ((2, 1, 2, 16), (2, 1, 2, 8))


def compiled(call: Any, **more: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(call, fullgraph=True, **{"backend": "aot_eager", **more})


def rotary() -> dict[str, Any]:
    angle = torch.arange(20)[:, None] * torch.tensor([0.5, 0.1])
    return {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "rotary_interleaved": False}


CALLS: dict[str, dict[str, Any]] = {
    "int": {"cache_seqlens": 7},
    "list": {"cache_seqlens": [7, 3]},
    "tensor": {"cache_seqlens": torch.tensor([7, 3], dtype=torch.int32), "causal": True},
    "leftpad": {"cache_seqlens": [7, 9], "leftpad": [2, 0], "window": (3, 0)},
    "batch_idx": {"cache_seqlens": [7, 9], "cache_batch_idx": torch.tensor([1, 0])},
    "rotary": {"cache_seqlens": [7, 9], "causal": True, **rotary()},
    "softcap": {"cache_seqlens": 7, "softcap": 2.0, "sinks": torch.zeros(4), "scale": 0.3},
}


@pytest.mark.parametrize("name", CALLS)
def test_compile_appends(name: str) -> None:
    """The caches of both calls end up the same, and a second step reads what the first wrote."""
    query, key, value, *new = tensors(*CACHE, *NEW)
    opts = CALLS[name]

    def step(query: Any, key: Any, value: Any, k: Any, v: Any) -> Any:
        out, lse = fa.attention_kvcache(query, key, value, k=k, v=v, **opts)
        return out * 2, lse, key.sum()

    ours, theirs = ([key.clone(), value.clone()] for _ in range(2))
    run = compiled(step)
    for _ in range(2):
        expected, got = step(query, *ours, *new), run(query, *theirs, *new)
        assert same(got, expected)
        assert same(theirs, ours)
    assert not torch.equal(ours[0], key)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "rotary"])
def test_compile_reads(name: str) -> None:
    query, key, value = tensors(*CACHE)

    def step(query: Any, key: Any, value: Any) -> Any:
        return fa.attention_kvcache(query, key, value, **CALLS[name])

    assert same(compiled(step)(query, key, value), step(query, key, value))


def test_compile_pages_and_positions_that_change() -> None:
    """One graph serves every position; keys lie in pages."""
    query, key, value, *new = tensors((1, 1, 4, 16), (5, 8, 2, 16), (5, 8, 2, 8), *NEW)
    k, v = (x[:1] for x in new)
    table = torch.tensor([[3, 0, 4]], dtype=torch.int32)
    graphs = torch._dynamo.testing.CompileCounter()

    def step(key: Any, value: Any, position: int) -> Any:
        return fa.attention_kvcache(
            query, key, value, k=k, v=v, cache_seqlens=position, block_table=table
        )

    run = compiled(step, backend=graphs, dynamic=True)
    ours, theirs = ([key.clone(), value.clone()] for _ in range(2))
    for position in (3, 7, 8, 16):
        assert same(run(*theirs, position), step(*ours, position))
        assert same(theirs, ours)
    assert graphs.frame_count == 1


def test_dropout_draws_anew_in_a_graph() -> None:
    query, key, value = tensors(*CACHE)

    def step(query: Any, key: Any, value: Any) -> Any:
        return fa.attention_kvcache(query, key, value, cache_seqlens=20, dropout_p=0.5)[0]

    run = compiled(step)
    torch.manual_seed(1)
    first, second = run(query, key, value), run(query, key, value)
    torch.manual_seed(1)
    assert torch.equal(step(query, key, value), first)
    assert not torch.equal(first, second)


def test_opcheck_of_caches() -> None:
    """torch's own test of the operators: schema, what they write, fake kernels, tracing."""
    query, key, value, *new = tensors(*CACHE, *NEW)
    lengths = torch.tensor([7, 3])
    options = pack("attention_kvcache", {"causal": True})
    rest = (lengths, None, None, None, None, True, *options)
    torch.library.opcheck(
        torch.ops.flashattn.append_and_attend.default, (query, key, value, *new, *rest)
    )
    torch.library.opcheck(
        torch.ops.flashattn.attend_to_cache.default, (query, key, value, None, None, *rest)
    )


def test_caches_have_no_gradient_in_a_graph_either() -> None:
    query, key, value = tensors(*CACHE)

    def step(query: Any, sinks: Any) -> Any:
        return fa.attention_kvcache(query, key, value, cache_seqlens=7, sinks=sinks)

    sinks = torch.zeros(4)
    for call in (step, compiled(step)):
        with pytest.raises(RuntimeError, match="attention_kvcache has no gradient"):
            call(query.clone().requires_grad_(), sinks)
        with pytest.raises(RuntimeError, match="attention_kvcache has no gradient"):
            call(query, sinks.clone().requires_grad_())
        with torch.no_grad():
            call(query.clone().requires_grad_(), sinks)


def test_out_is_refused_while_tracing() -> None:
    query, key, value = tensors(*CACHE)
    place = torch.zeros(2, 1, 4, 8)

    def step(query: Any) -> Any:
        return fa.attention_kvcache(query, key, value, cache_seqlens=7, out=place)

    step(query)
    with pytest.raises(Exception, match="out must not be given where torch traces"):
        compiled(step)(query)


def parts(grad: bool = True) -> tuple[list[Any], list[Any]]:
    made = tensors(*[(2, 5, 4, 8)] * 3, *[(2, 4, 5)] * 3, grad=grad)
    return made[:3], made[3:]


def merged(outs: Any, lses: Any) -> Any:
    return fa.merge_attention(outs, lses)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_compile_merges(backend: str) -> None:
    outs, lses = parts()
    expected, got = merged(outs, lses), compiled(merged, backend=backend)(outs, lses)
    assert same(got, expected)
    for wanted in ([*outs, *lses], [outs[1], lses[2]]):
        grads = [
            torch.autograd.grad(out.square().sum() + lse.sum(), wanted, retain_graph=True)
            for out, lse in (got, expected)
        ]
        assert same(*grads)


def test_compile_merges_attention_in_parts() -> None:
    """The whole of it in one graph: parts, their merge, and the gradients."""
    inputs = tensors((2, 9, 4, 16), (2, 20, 2, 16), (2, 20, 2, 8), grad=True)

    def call(q: Any, k: Any, v: Any) -> Any:
        halves = [fa.attention(q, k[:, s], v[:, s], return_lse=True) for s in HALVES]
        return fa.merge_attention([h[0] for h in halves], [h[1] for h in halves])[0]

    got, expected = compiled(call)(*inputs), call(*inputs)
    assert torch.equal(got, expected)
    dout = torch.ones_like(got)
    assert same(torch.autograd.grad(got, inputs, dout), torch.autograd.grad(expected, inputs, dout))


HALVES = (slice(0, 11), slice(11, 20))


def test_opcheck_of_merges() -> None:
    outs, lses = parts()
    torch.library.opcheck(torch.ops.flashattn.merge.default, (outs, lses, False))
    plain = [[x.detach() for x in each] for each in (outs, lses)]
    torch.library.opcheck(
        torch.ops.flashattn.merge_backward.default,
        (outs[0].detach(), None, [True] * 5 + [False], *plain, False),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_transforms_of_merges_are_refused() -> None:
    outs, lses = parts(grad=False)
    with pytest.raises(NotImplementedError, match="merge_attention: torch"):
        torch.func.grad(lambda x: merged([x, outs[1]], lses[:2])[0].sum())(outs[0])
    with pytest.raises(NotImplementedError, match="merge_attention: torch"):
        torch.vmap(lambda x: merged([x, outs[1]], lses[:2]))(outs[0][None])


def test_double_backward_of_the_merge_operator_is_an_error() -> None:
    outs, lses = parts()
    out, _ = torch.ops.flashattn.merge(outs, lses, False)
    (grad,) = torch.autograd.grad(out.square().sum(), outs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_of_a_block(reentrant: bool) -> None:
    """Projections, attention in two parts, their merge: recomputed in backward, the same bits."""
    x, weight = tensors((2, 12, 32), (32, 96), grad=True)

    def block(x: Any, weight: Any) -> Any:
        q, k, v = (x @ weight).unflatten(-1, (3, 4, 8)).unbind(2)
        halves = [
            fa.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(5), slice(5, None))
        ]
        return fa.merge_attention([h[0] for h in halves], [h[1] for h in halves])[0]

    expected = torch.autograd.grad(block(x, weight).square().sum(), (x, weight))
    checkpoint(block, x, weight, use_reentrant=reentrant).square().sum().backward()
    assert same((x.grad, weight.grad), expected)
