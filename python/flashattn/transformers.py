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


class _Rule(torch.Tensor):
    """What a layer's queries see, told in a few numbers. Its rows and keys end at one position.

    It poses as a mask of (batch, 1, seqlen_q, seqlen_k), because transformers hands masks that it
    has already made back to itself and knows them by their kind and shape. It has no elements to
    read: every operation on it is refused, so that no model can lose a rule by slicing it.

    Attributes:
        causal: keys behind a query are not seen.
        window: (left, right) distances, -1 unlimited.
        keys: bool (batch, seqlen_k), False for padding; or None.
        starts: int32 (documents + 1,) where documents of the rows, end to end, start; or None.
    """

    causal: bool
    window: tuple[int, int]
    keys: torch.Tensor | None
    starts: torch.Tensor | None

    @staticmethod
    def make(sizes: tuple[int, ...], device: Any, parts: _Parts) -> _Rule:
        """A rule that poses as a mask of `sizes`."""
        one = torch.ones((), dtype=torch.bool, device=device)
        rule: _Rule = torch.Tensor._make_subclass(_Rule, one.expand(sizes))
        rule.causal, rule.window = parts.causal, parts.window
        rule.keys = rule.starts = None
        return rule

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Sizes, dtype and device can be asked for; what would give the same mask gives it."""
        if func.__name__ == "__get__" or func in (torch.Tensor.dim, torch.Tensor.size):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in (torch.Tensor.detach, torch.Tensor.contiguous, torch.Tensor.clone):
            return args[0]
        raise NotImplementedError(f"this attention mask is a rule and takes no part in {func}")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"_Rule(causal={self.causal}, window={self.window})"


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
    sizes = (batch_size, 1, q_length, kv_length)
    rule = _Rule.make(sizes, options.get("device", "cpu"), parts)
    rule.keys = None if keys is None or bool(keys.all()) else keys
    rule.starts = None if parts.documents is None else _starts(parts.documents)
    return rule


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
    rule, mask, starts = attention_mask, None, None
    if rule is None:
        asked = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        options["causal"] = bool(asked)
    elif isinstance(rule, _Rule):
        options |= {"causal": rule.causal, "window": rule.window}
        starts = rule.starts
        if rule.keys is not None:
            mask = rule.keys[:, None, None, :]
    else:
        mask = rule[..., : k.shape[1]]
    if mask is None and starts is None and options["causal"] and q.shape[1] == k.shape[1]:
        starts = _restarts(others.get("position_ids"), q.shape[0])
    if starts is not None:
        return _packed(q, k, v, starts, position_bias, options), None
    if position_bias is not None:
        mask = _biased(mask, position_bias)
    out: torch.Tensor = attention(q, k, v, mask=mask, **options)
    return out, None


def _restarts(position_ids: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """Where documents start, for models whose layers know the positions and whose masks do not."""
    if position_ids is None or position_ids.ndim != 2 or torch.compiler.is_compiling():
        return None
    documents = masking_utils.find_packed_sequence_indices(position_ids.expand(batch, -1))
    return None if documents is None else _starts(documents)


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
