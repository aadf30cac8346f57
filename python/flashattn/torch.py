"""For torch's users: scaled_dot_product_attention as torch spells it, a module, and routing.

Relies on `flashattn.attention` for all numbers. Importing it imports torch.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flashattn import _torch_ops  # noqa: F401 - exported programs need the operators
from flashattn._api import attention
from flashattn._options import DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FlashAttention", "route_sdpa", "scaled_dot_product_attention"]

_SDPA = "scaled_dot_product_attention"


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention, computed here.

    Batch axes, and without enable_gqa the heads axis, broadcast as torch lets them. Causal masks
    align top-left: query row i sees keys 0..i. A row that sees no key gives 0, as torch's does.
    Differentiable in query, key, value and a floating attn_mask.

    Args:
        query: (..., heads, seqlen_q, head_dim) or (batch, seqlen_q, head_dim).
        key: (..., heads, seqlen_k, head_dim); with enable_gqa its heads divide query's.
        value: (..., heads, seqlen_k, value_dim).
        attn_mask: bool (True attends) or floating (added), broadcastable to
            (..., heads, seqlen_q, seqlen_k), or one of torch.nn.attention.bias. Together with
            is_causal a key must pass both.
        dropout_p: probability of dropping an attention weight; the seed is drawn from torch's
            generator. Applied whatever the mode of a module, as torch does.
        is_causal: row i sees keys 0..i.
        scale: default head_dim ** -0.5.
        enable_gqa: query heads share key heads in groups.

    Returns:
        (..., heads, seqlen_q, value_dim) in query's dtype.

    Raises:
        ValueError: shapes that do not fit or broadcast.
        TypeError: dtypes other than float32, float16, bfloat16.
    """
    shape, keys = query.shape, key.shape
    batch: tuple[int, ...] = shape[:-2]
    if not (
        len(shape) == len(keys) == 4
        and keys[:3] == value.shape[:3]
        and shape[0] == keys[0]
        and (enable_gqa or shape[1] == keys[1])
    ):
        batch, (query, key, value) = _broadcast((query, key, value), enable_gqa)
    causal: Any = "top_left" if is_causal else False
    mask = attn_mask
    alignment = _causal_bias(mask)
    if alignment is not None:
        if is_causal:
            raise ValueError(f"{_SDPA}: is_causal (True) must be False with a causal bias")
        causal, mask = alignment, None
    options: dict[str, Any] = {"layout": "bhsd"}
    if causal:
        options["causal"] = causal
    if mask is not None:
        options["mask"] = _flat_mask(mask, batch)
    if dropout_p != 0:
        options["dropout_p"] = dropout_p
    if scale is not None:
        options["scale"] = scale
    out: torch.Tensor = attention(query, key, value, **options)
    return out if len(batch) == 2 else out.reshape(*batch, *out.shape[-2:])


def _causal_bias(mask: Any) -> Any:
    """The `causal` that one of torch.nn.attention.bias stands for; None for other masks."""
    if mask is None or type(mask) is torch.Tensor:
        return None
    # Importing that module imports torch's compiler; a mask of its kind shows that it is there.
    bias = sys.modules.get("torch.nn.attention.bias")
    if bias is None or not isinstance(mask, bias.CausalBias):
        return None
    return "top_left" if mask.variant == bias.CausalVariant.UPPER_LEFT else True


def _broadcast(
    tensors: tuple[torch.Tensor, ...], enable_gqa: bool
) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """The leading axes of the result, heads included, and the tensors with exactly four axes."""
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        if tensor.ndim < 2:
            raise ValueError(f"{_SDPA}: {name}.ndim ({tensor.ndim}) must be at least 2")
    # A missing heads axis, and what stands before it, are axes of size 1.
    axes = max(2, *(tensor.ndim - 2 for tensor in tensors))
    three = all(tensor.ndim <= 3 for tensor in tensors)
    if three:  # (batch, seqlen, dim): the heads axis goes behind the batch
        full = [tensor.reshape(-1, 1, *tensor.shape[-2:]) for tensor in tensors]
    else:
        full = [t.reshape(*[1] * (axes + 2 - t.ndim), *t.shape) for t in tensors]
    try:
        broadcast: Any = torch.broadcast_shapes
        lead = broadcast(*(t.shape[:-3] for t in full))
        heads = [t.shape[-3] for t in full]
        if not enable_gqa:
            heads = [*broadcast(*((h,) for h in heads))] * 3
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(
            f"{_SDPA}: leading axes of query, key and value ({shapes}) must broadcast"
            " (or pass enable_gqa=True for grouped heads)"
        ) from error
    flat = [
        t.expand(*lead, h, *t.shape[-2:]).reshape(math.prod(lead), h, *t.shape[-2:])
        for t, h in zip(full, heads, strict=True)
    ]
    if three:
        ndim = max(t.ndim for t in tensors)
        return tuple(lead) if ndim == 3 else (), flat
    return (*lead, heads[0]), flat


def _flat_mask(mask: torch.Tensor, batch: tuple[int, ...]) -> torch.Tensor:
    """A mask over (*batch, seqlen_q, seqlen_k) as one over four axes."""
    if len(batch) < 2:  # no heads axis
        return mask if mask.ndim < 3 else mask.unsqueeze(-3)
    if mask.ndim <= 4 and len(batch) == 2:
        return mask
    lead = mask.shape[:-3]
    if math.prod(lead) == 1:
        return mask.reshape(mask.shape[-3:]) if mask.ndim >= 3 else mask
    wide = mask.expand(*batch[:-1], *mask.shape[-3:])
    return wide.reshape(math.prod(batch[:-1]), *mask.shape[-3:])


class FlashAttention(torch.nn.Module):
    """`flashattn.attention` as a module: options once, tensors at each call, dropout in training.

    Args:
        dropout_p: probability of dropping an attention weight in training mode.
        alibi_slopes: float32 (query_heads,); becomes a buffer.
        sinks: float32 (query_heads,); a Parameter is trained, a tensor becomes a buffer.
        **options: any option of `flashattn.attention` that does not change from call to call.

    Raises:
        TypeError: an unknown option, or one that belongs to a call.
    """

    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    _PER_CALL = ("mask", "kv_lengths", "dropout_seed", "dropout_offset")

    def __init__(
        self,
        *,
        dropout_p: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for name in options:
            if name not in DEFAULTS or name in self._PER_CALL:
                raise TypeError(f"FlashAttention: unknown option {name!r}")
        self.dropout_p = dropout_p
        self.options = options
        for name, tensor in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
            if isinstance(tensor, torch.nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        """`flashattn.attention` of these tensors; `options` go before the module's own."""
        given: Mapping[str, Any] = {
            "dropout_p": self.dropout_p if self.training else 0.0,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
            **self.options,
            **options,
        }
        used = {name: value for name, value in given.items() if value is not None}
        return attention(query, key, value, return_lse=return_lse, **used)

    def extra_repr(self) -> str:
        """The options."""
        return ", ".join(
            f"{k}={v!r}" for k, v in {"dropout_p": self.dropout_p, **self.options}.items()
        )


class route_sdpa(TorchFunctionMode):  # noqa: N801 - used like a function
    """In this context, torch.nn.functional.scaled_dot_product_attention is computed here.

    >>> with flashattn.torch.route_sdpa():
    ...     out = model(x)

    Every call in the thread is met, however the function was imported. What this package cannot do
    raises; nothing falls back to torch's own. Encoder layers of torch.nn take a fused path of their
    own in inference, which is no call of that function.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls ours for torch's."""
        call = (
            scaled_dot_product_attention
            if func is functional.scaled_dot_product_attention
            else func
        )
        return call(*args, **(kwargs or {}))
