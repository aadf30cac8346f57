"""flashattn.transformers: which masks stay rules, which are transformers' own, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from targets import chosen_is_simulated
from torch_numbers import missing

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import flashattn.transformers as ours  # noqa: E402 - transformers may be absent
from tiny_models import exact_mask, model, tokens  # noqa: E402

pytestmark = pytest.mark.skipif(chosen_is_simulated(), reason="whole models take too long there")


def test_masks_stay_rules() -> None:
    """No (seqlen, seqlen) tensor where a rule does; transformers' own mask where none is known."""
    utils = transformers.masking_utils
    sizes: dict[str, Any] = {"batch_size": 2, "q_length": 6, "kv_length": 6}
    skip = {"allow_is_causal_skip": True}
    causal = ours._mask(**sizes, **skip)
    assert (causal.causal, causal.window, causal.keys) == (True, (-1, -1), None)
    window = utils.sliding_window_causal_mask_function(4)
    assert ours._mask(**sizes, **skip, mask_function=window).window == (3, -1)
    padding = torch.ones(2, 6, dtype=torch.bool)
    assert ours._mask(**sizes, **skip, attention_mask=padding).keys is None
    padding[0, 0] = False
    assert torch.equal(ours._mask(**sizes, **skip, attention_mask=padding).keys, padding)
    documents = utils.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 1, 2]] * 2))
    packed = utils.and_masks(utils.causal_mask_function, documents)
    starts = ours._mask(**sizes, mask_function=packed).starts
    assert starts.tolist() == [0, 2, 5, 6, 8, 11, 12]
    chunked = utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64))
    mine = utils.and_masks(utils.causal_mask_function, lambda b, h, q, k: k != 2)
    for function, more in ((chunked, {**skip, "local_size": 3}), (mine, {"use_vmap": False})):
        got = ours._mask(**sizes, **more, mask_function=function)
        assert torch.equal(got, exact_mask(**sizes, mask_function=function))
    # A preallocated cache: more keys than positions so far.
    longer = sizes | {"kv_length": 10}
    assert torch.equal(ours._mask(**longer, **skip), exact_mask(**longer))


def test_masks_of_a_users_own() -> None:
    """Four axes, boolean or added, are taken as they are."""
    if missing("mask"):
        return
    ids = tokens(1, 2, 9)
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.7
    mask |= torch.eye(9, dtype=torch.bool)
    added = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    expected = model("llama", "eager")(input_ids=ids, attention_mask=added).logits
    for one in (mask, added):
        got = model("llama", "fused_attention")(input_ids=ids, attention_mask=one).logits
        assert torch.allclose(
            got, expected, rtol=0, atol=2e-5 * float(expected.detach().abs().max())
        )


def test_refusals() -> None:
    with pytest.raises(ValueError, match="flash"):
        ours.register("flash_fused")
    with pytest.raises(ValueError, match="output_attentions"):
        ours._attention(
            torch.nn.Identity(), *[torch.ones(1, 1, 2, 4)] * 3, None, output_attentions=True
        )
