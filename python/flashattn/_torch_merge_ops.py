"""merge_attention as operators of torch's dispatcher, `flashattn::merge` and `::merge_backward`.

As `_torch_ops`, for calls that torch traces, transforms or dispatches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashattn import _merge
from flashattn._arrays import one_framework
from flashattn._torch_ops import is_transformed, refuse_second

if TYPE_CHECKING:
    from collections.abc import Sequence

_PARTS = "Tensor[] outs, Tensor[] lses, bool heads_first"


@torch.library.custom_op(
    "flashattn::merge", mutates_args=(), schema=f"({_PARTS}) -> (Tensor, Tensor)"
)
def merge(outs: Any, lses: Any, heads_first: Any) -> tuple[Any, Any]:
    """(out, lse) of merge_attention."""
    framework = one_framework("merge_attention", "outs[0]", outs[0])
    return _merge.run(framework, list(outs), list(lses), heads_first)


@merge.register_fake
def _(outs: Any, lses: Any, heads_first: Any) -> tuple[Any, Any]:
    return _new(outs[0]), _new(lses[0])


@torch.library.custom_op(
    "flashattn::merge_backward",
    mutates_args=(),
    schema=f"(Tensor? dout, Tensor? dlse, bool[] wanted, {_PARTS}) -> Tensor[]",
)
def merge_backward(
    dout: Any, dlse: Any, wanted: Any, outs: Any, lses: Any, heads_first: Any
) -> list[Any]:
    """The wanted gradients of all outs and then all lses, and no others."""
    framework = one_framework("merge_attention", "outs[0]", outs[0])
    dout = torch.zeros_like(outs[0]) if dout is None else dout
    found = _merge.gradients(framework, dout, dlse, wanted, list(outs), list(lses), heads_first)
    return [gradient for gradient in found if gradient is not None]


@merge_backward.register_fake
def _(dout: Any, dlse: Any, wanted: Any, outs: Any, lses: Any, heads_first: Any) -> list[Any]:
    return [_new(x) for x, want in zip([*outs, *lses], wanted, strict=True) if want]


def _new(tensor: Any) -> Any:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    outs, lses, ctx.heads_first = inputs
    ctx.set_materialize_grads(False)
    ctx.count = len(outs)
    ctx.wanted = [x.requires_grad for x in (*outs, *lses)]
    ctx.save_for_backward(*outs, *lses)


def _gradients(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    found: list[Any] = [None] * len(tensors)
    if dout is not None or dlse is not None:
        parts = (list(tensors[: ctx.count]), list(tensors[ctx.count :]), ctx.heads_first)
        computed = iter(merge_backward(dout, dlse, ctx.wanted, *parts))
        found = [next(computed) if want else None for want in ctx.wanted]
    return found[: ctx.count], found[ctx.count :], None


merge.register_autograd(_gradients, setup_context=_save)
merge_backward.register_autograd(refuse_second)


def dispatch(outs: Sequence[Any], lses: Sequence[Any], heads_first: bool) -> tuple[Any, Any]:
    """(out, lse) through the dispatcher.

    Raises:
        NotImplementedError: one of functorch's transforms, which do not differentiate operators
            over lists and cannot batch them.
    """
    if is_transformed():
        raise NotImplementedError(
            "merge_attention: torch.func and torch.vmap are not supported; torch.autograd and"
            " torch.compile are"
        )
    result: tuple[Any, Any] = merge(list(outs), list(lses), heads_first)
    return result
