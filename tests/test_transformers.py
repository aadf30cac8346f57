"""Hugging Face transformers: tiny models of random weights compute the same through
flashattn.transformers as through eager attention: logits, gradients, generated tokens; padded and
packed batches.

The oracle is the model in float64 with attention written out in float64; the yardstick of the
tolerance rule is eager attention in float32, the worst of a few inputs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from targets import chosen_is_simulated
from tolerance import GRADIENT_FACTOR, assert_close
from torch_numbers import missing

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tiny_models import NEEDS, model, tokens  # noqa: E402 - transformers may be absent

pytestmark = pytest.mark.skipif(chosen_is_simulated(), reason="whole models take too long there")

KINDS = ["llama", "mistral", "gemma2", "gpt_oss"]


def logits_and_gradients(net: Any, inputs: dict[str, Any], counted: Any) -> tuple[Any, Any]:
    """Logits of the tokens that count, and all gradients of a loss of theirs."""
    net.zero_grad()
    logits = net(**inputs, use_cache=False).logits
    labels = inputs["input_ids"]
    chosen = logits[counted]
    loss = torch.nn.functional.cross_entropy(chosen, labels[counted], reduction="sum")
    loss.backward()
    return chosen.detach(), {n: p.grad.clone() for n, p in net.named_parameters()}


def check(kind: str, batches: list[tuple[dict[str, Any], Any]]) -> None:
    """The rule on the first batch; all of them are the yardstick's."""
    exact = model(kind, "exact", torch.float64)
    eager, fused = model(kind, "eager"), model(kind, "fused_attention")
    errors: dict[str, float] = {}
    first: dict[str, Any] = {}
    for inputs, counted in batches:
        logits, gradients = logits_and_gradients(exact, inputs, counted)
        truth = {"logits": logits, **gradients}
        logits, gradients = logits_and_gradients(eager, inputs, counted)
        for name, x in {"logits": logits, **gradients}.items():
            error = float((x.double() - truth[name]).abs().max())
            errors[name] = max(errors.get(name, 0.0), error)
        first = first or truth
    logits, gradients = logits_and_gradients(fused, *batches[0])
    for name, x in {"logits": logits, **gradients}.items():
        factor = 2.0 if name == "logits" else GRADIENT_FACTOR
        assert_close(x.numpy(), first[name].numpy(), errors[name], factor=factor, name=name)


def everything(ids: Any) -> Any:
    return torch.ones_like(ids, dtype=torch.bool)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients(kind: str) -> None:
    if missing(*NEEDS[kind]):
        return
    batches = [tokens(seed, 3, 17) for seed in range(4)]
    check(kind, [({"input_ids": ids}, everything(ids)) for ids in batches])


def same(kind: str, one: Any, other: Any) -> bool:
    """Bit for bit, except after experts, whose products change with the tokens that they get."""
    if kind != "gpt_oss":
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=0, atol=2e-5 * float(one.detach().abs().max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(kind: str, side: str) -> None:
    """Logits of real tokens and all gradients; what padding holds cannot matter."""
    if missing("mask", *NEEDS[kind]):
        return
    mask = torch.ones(3, 17, dtype=torch.int64)
    for row, length in enumerate((17, 9, 2)):
        mask[row, : 17 - length] = 0
    mask = mask if side == "left" else mask.flip(1)
    batches = [
        ({"input_ids": tokens(seed, 3, 17) * mask, "attention_mask": mask}, mask.bool())
        for seed in range(4)
    ]
    check(kind, batches)
    inputs, counted = batches[0]
    net = model(kind, "fused_attention")
    noise = torch.where(mask.bool(), inputs["input_ids"], tokens(9, 3, 17))
    one, other = (
        net(input_ids=ids, attention_mask=mask, use_cache=False).logits[counted]
        for ids in (inputs["input_ids"], noise)
    )
    assert same(kind, one, other)


POSITIONS = torch.tensor([[*range(6), *range(11)], [*range(1), *range(9), *range(7)]])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_batches(kind: str) -> None:
    """Documents one behind the other in a row, told by positions that restart."""
    if missing(*NEEDS[kind]):
        return
    batches = [
        ({"input_ids": ids, "position_ids": POSITIONS}, everything(ids))
        for ids in (tokens(seed, 2, 17) for seed in range(4))
    ]
    if kind != "gpt_oss":  # whose masks, eager's too, are not told the positions: documents leak
        check(kind, batches)
    # The document alone: nothing leaks into it.
    ids = batches[0][0]["input_ids"]
    net = model(kind, "fused_attention")
    packed = net(input_ids=ids, position_ids=POSITIONS, use_cache=False).logits[0, 6:]
    alone = net(input_ids=ids[:1, 6:], use_cache=False).logits[0]
    assert torch.allclose(packed, alone, rtol=0, atol=2e-5 * float(alone.detach().abs().max()))
    changed = ids.clone()
    changed[0, :6] = 7
    again = net(input_ids=changed, position_ids=POSITIONS, use_cache=False).logits[0, 6:]
    assert same(kind, packed, again)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_generate(kind: str, cache: str | None, padded: bool) -> None:
    """Greedy decoding with a cache, longer than the windows, gives eager's tokens."""
    if missing(*NEEDS[kind]) or (missing("mask") and (padded or cache)):
        return
    ids = tokens(1, 2, 9)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    if cache is not None:
        options |= {"cache_implementation": cache, "disable_compile": True}
    found = [
        model(kind, name).generate(ids * mask, **options) for name in ("eager", "fused_attention")
    ]
    assert found[1].shape == (2, 21)
    assert torch.equal(*found)


def test_chunked_prefill() -> None:
    """A cache that holds a part: new rows see all of it."""
    ids = tokens(1, 2, 17)
    net = model("llama", "fused_attention")
    whole = net(input_ids=ids).logits
    first = net(input_ids=ids[:, :10])
    rest = net(input_ids=ids[:, 10:], cache=first.past_key_values).logits
    assert torch.allclose(
        whole[:, 10:], rest, rtol=0, atol=2e-5 * float(whole.detach().abs().max())
    )


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_compile(kind: str) -> None:
    if missing("mask", *NEEDS[kind]):
        return
    ids = tokens(1, 2, 17)
    net = model(kind, "fused_attention")
    torch.compiler.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    one, other = (f(input_ids=ids, use_cache=False).logits for f in (compiled, net))
    assert torch.allclose(one, other, rtol=0, atol=2e-5 * float(other.detach().abs().max()))


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_activation_checkpointing(kind: str) -> None:
    """Layers that are computed twice get the same rules."""
    if missing("mask", *NEEDS[kind]):
        return
    ids = tokens(1, 2, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    net = model(kind, "fused_attention").train()
    expected = logits_and_gradients(net, inputs, mask.bool())
    net.activation_checkpointing_enable()
    logits, gradients = logits_and_gradients(net, inputs, mask.bool())
    assert torch.equal(logits, expected[0])
    assert all(torch.equal(gradients[name], x) for name, x in expected[1].items())


def test_encoders() -> None:
    """Attention both ways, padded."""
    if missing("mask"):
        return
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    plan = transformers.BertConfig(vocab_size=61, intermediate_size=48, **sizes)
    eager = transformers.BertModel._from_config(plan, attn_implementation="eager").eval()
    fused = transformers.BertModel._from_config(plan, attn_implementation="fused_attention").eval()
    fused.load_state_dict(eager.state_dict())
    ids = tokens(1, 2, 9)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    for given in (None, mask):
        one, other = (net(input_ids=ids, attention_mask=given)[0] for net in (eager, fused))
        kept = mask.bool() if given is not None else everything(ids)
        assert torch.allclose(one[kept], other[kept], rtol=0, atol=2e-6)
