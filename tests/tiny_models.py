"""Models of Hugging Face transformers, tiny and of random weights; and attention that is exact.

Importing this needs transformers, and registers "fused_attention" and "exact" with it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import flashattn.transformers
import torch
import transformers

flashattn.transformers.register()

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# What a backend must have for each kind.
NEEDS = {
    "llama": (),
    "mistral": (),
    "gemma2": ("softcap",),
    "gpt_oss": ("sinks",),
    "bert": ("mask",),
}


def exact_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **_: Any,
) -> tuple[Any, None]:
    """Attention written out in float64, whatever the model's dtype."""
    group = query.shape[1] // key.shape[1]
    q, k, v = (x.double() for x in (query, key, value))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * (scaling or query.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if s_aux is not None:
        sink = s_aux.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].nan_to_num(0.0)
    return (weights @ v).transpose(1, 2).to(query.dtype).contiguous(), None


def exact_mask(*args: Any, **kwargs: Any) -> Any:
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return transformers.masking_utils.sdpa_mask(*args, **kwargs)


transformers.AttentionInterface.register("exact", exact_attention)
transformers.AttentionMaskInterface.register("exact", exact_mask)


def config(kind: str) -> Any:
    windows = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    if kind == "llama":
        return transformers.LlamaConfig(**SIZES)
    if kind == "mistral":
        return transformers.MistralConfig(**SIZES, sliding_window=5)
    if kind == "gemma2":
        more = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 3, **windows}
        return transformers.Gemma2Config(**SIZES, **more)
    more = {"num_local_experts": 2, "num_experts_per_tok": 2, **windows}
    return transformers.GptOssConfig(**SIZES, **more)


@lru_cache
def weights(kind: str) -> dict[str, Any]:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return model.state_dict()


def model(kind: str, attention: str, dtype: Any = torch.float32) -> Any:
    # The experts' grouped product has no float64.
    names = {"attn_implementation": attention, "experts_implementation": "eager"}
    made = transformers.AutoModelForCausalLM.from_config(config(kind), **names)
    made.load_state_dict(weights(kind))
    return made.to(dtype).eval()


def tokens(seed: int, *shape: int) -> Any:
    return torch.randint(2, 61, shape, generator=torch.Generator().manual_seed(seed))
