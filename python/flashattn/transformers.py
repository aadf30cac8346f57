"""Hugging Face transformers: its models compute their attention here.

    import flashattn.transformers
    flashattn.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fused_attention")

Masks stay rules wherever they can: causal, sliding windows, padding and packed documents never
become a (seqlen, seqlen) tensor. What is not recognised as one of these (masks of a user's own,
chunked attention, preallocated caches) is the boolean mask that transformers itself makes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from flashattn._api import attention
from flashattn._varlen import attention_varlen

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["register"]

_UNLIMITED = -1


def register(name: str = "fused_attention") -> None:
    """Makes `name` an attention implementation of transformers, its mask rules included.

    Args:
        name: what goes into `attn_implementation`. transformers looks for a kernel to download
            where the name contains "flash".

    Raises:
        ValueError: such a name.
    """
    if "flash" in name:
        raise ValueError(f"register: name ({name!r}) must not contain 'flash'")
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask)


@dataclass
class _Rule:
    """What a layer's queries see. Its rows and keys end at the same position.

    Attributes:
        causal: keys behind a query are not seen.
        window: (left, right) distances, -1 unlimited.
        keys: bool (batch, seqlen_k), False for padding; or None.
        starts: int32 (documents + 1,) where documents of the rows, end to end, start; or None.
    """

    causal: bool
    window: tuple[int, int]
    keys: torch.Tensor | None = None
    starts: torch.Tensor | None = None


@dataclass
class _Parts:
    """What a mask function of transformers consists of."""

    causal: bool = False
    window: tuple[int, int] = (_UNLIMITED, _UNLIMITED)
    documents: torch.Tensor | None = None


def _cells(function: Callable[..., Any]) -> dict[str, Any]:
    closure = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, closure, strict=True)}


def _recognise(function: Callable[..., Any], parts: _Parts) -> bool:
    """Adds to `parts` what `function` asks for; False where that is something else.

    transformers hands over closures and no description; each is known by the function of
    masking_utils that makes it.
    """
    if function is masking_utils.causal_mask_function:
        parts.causal = True
        return True
    if function is masking_utils.bidirectional_mask_function:
        return True
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return False
    maker = function.__qualname__.partition(".<locals>")[0]
    cells = _cells(function)
    if maker == "and_masks":
        return all(_recognise(one, parts) for one in cells["mask_functions"])
    if maker == "sliding_window_overlay":
        parts.window = (cells["sliding_window"] - 1, _UNLIMITED)
        return True
    if maker == "sliding_window_bidirectional_overlay":
        parts.window = (cells["sliding_window"],) * 2
        return True
    if maker == "packed_sequence_mask_function":
        parts.documents = cells["packed_sequence_mask"]
        return True
    if maker == "remap_positions_for_packed_sequence":
        # Positions that restart with each document: distances within one are the same.
        return _recognise(cells["mask_function"], parts)
    return False


def _starts(documents: torch.Tensor) -> torch.Tensor:
    """Where a new document begins in rows laid end to end, and the end of the last."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    found = begins.flatten().nonzero().flatten()
    return torch.cat([found, found.new_tensor([documents.numel()])]).to(torch.int32)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """The mask function: a _Rule; or transformers' own answer, a bool tensor or None."""
    ends_meet = (
        not isinstance(q_offset, torch.Tensor)
        and not isinstance(kv_offset, torch.Tensor)
        and q_offset + q_length == kv_offset + kv_length
    )
    parts = _Parts()
    # A graph cannot depend on which closures there are, nor on what a padding mask holds.
    known = not torch.compiler.is_compiling() and _recognise(mask_function, parts)
    skips = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
    wants_tensor = parts.documents is None and not any(options.get(name) for name in skips)
    is_full = not parts.causal and parts.window == (_UNLIMITED, _UNLIMITED)
    if not known or wants_tensor or not (ends_meet or is_full):
        # Its None stands for causal from the first key on, which is ours where the ends meet.
        options |= {name: ends_meet and options.get(name, False) for name in skips}
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **options,
        )
    keys = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if keys is not None:
        keys = keys[:, kv_offset : kv_offset + kv_length]
        keys = None if bool(keys.all()) else keys
    starts = None if parts.documents is None else _starts(parts.documents)
    return _Rule(parts.causal, parts.window, keys, starts)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: (batch, heads, seqlen, dim) in, (batch, seqlen, heads, dim) out.

    A window in `others` is the mask's too, which counts. Weights cannot be had.
    """
    if others.get("output_attentions"):
        raise ValueError("output_attentions (True) must be False: weights are never stored")
    options: dict[str, Any] = {}
    if scaling is not None:
        options["scale"] = scaling
    if softcap is not None:
        options["softcap"] = softcap
    if s_aux is not None:
        options["sinks"] = s_aux.float()
    if dropout > 0:
        options["dropout_p"] = dropout
    # Their layout is the other one, but its memory is usually ours.
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    rule = attention_mask
    if rule is None:
        asked = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        rule = _Rule(bool(asked), (_UNLIMITED, _UNLIMITED))
    mask = None
    if isinstance(rule, _Rule):
        options |= {"causal": rule.causal, "window": rule.window}
        if rule.starts is not None:
            return _packed(q, k, v, rule.starts, position_bias, options), None
        if rule.keys is not None:
            mask = rule.keys[:, None, None, :]
    else:
        mask = rule[..., : k.shape[1]]
    if position_bias is not None:
        mask = _biased(mask, position_bias)
    out: torch.Tensor = attention(q, k, v, mask=mask, **options)
    return out, None


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    position_bias: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    if position_bias is not None:
        raise NotImplementedError("position_bias cannot be used with packed documents")
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    out, _ = attention_varlen(rows[0], rows[1], rows[2], starts, starts, **options)
    result: torch.Tensor = out.unflatten(0, q.shape[:2])
    return result


def _biased(mask: torch.Tensor | None, bias: torch.Tensor) -> torch.Tensor:
    """An additive mask that is -inf where `mask` excludes."""
    if mask is None:
        return bias
    if mask.dtype is torch.bool:
        return torch.where(mask, bias, -math.inf)
    return mask + bias
