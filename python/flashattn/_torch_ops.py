"""The attention calls as operators of torch's dispatcher, `flashattn::forward` and `::backward`.

What torch.compile, torch.export, functorch's transforms, dispatch modes and tensor subclasses see
instead of calls that they cannot look into. Calls on plain tensors do not come here: an operator
costs several times what they do. Nothing is compiled against torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flashattn import _api, _varlen
from flashattn._arrays import framework_of
from flashattn._framework import output_shapes, packed_shapes
from flashattn._options import DEFAULTS, DropoutShard, parse_own

if TYPE_CHECKING:
    from collections.abc import Mapping

# Everything behind query, key and value, in the operators' order. Where an option may be a number
# or an array, the array has a name of its own.
_ARRAYS = {
    "mask": "Tensor?",
    "alibi_slopes": "Tensor?",
    "sinks": "Tensor?",
    "kv_lengths": "Tensor?",
    "q_offsets": "Tensor?",
    "cu_seqlens_q": "Tensor?",
    "cu_seqlens_k": "Tensor?",
    "block_table": "Tensor?",
    "drawn_seed": "Tensor?",  # where the call draws dropout's seed: a graph must draw at each run
}
_VALUES = {
    "scale": "float?",
    "causal": "str",
    "window": "SymInt[]",
    "softcap": "float",
    "dropout_p": "float",
    "dropout_seed": "int",  # the bits of the unsigned number, as dropout_offset is
    "dropout_offset": "int",
    "dropout_shard": "SymInt[]?",
    "q_offset": "SymInt?",
    "k_offset": "SymInt",
    "layout": "str",
    "backend": "str?",
}
_NAMES = (*_ARRAYS, *_VALUES)
_UNSET: dict[str, Any] = {**dict.fromkeys(_ARRAYS), **DEFAULTS}
PARAMETERS = ", ".join(f"{kind} {name}" for name, kind in (_ARRAYS | _VALUES).items())
_INPUTS = f"Tensor query, Tensor key, Tensor value, {PARAMETERS}"
_CAUSAL = {"False": False, "True": True, "top_left": "top_left"}
_UNSIGNED = ("dropout_seed", "dropout_offset")


def pack(function: str, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """The operators' arguments behind query, key, value; torch.compile can trace this.

    Raises:
        TypeError: an unknown option.
        ValueError: an unknown `causal`. Other values are checked when the operator runs.
    """
    given = dict(_UNSET)
    for name, value in options.items():
        if name not in _UNSET:
            raise TypeError(f"{function}: unknown option {name!r}")
        given[name] = value
    given["causal"] = str(given["causal"])
    if given["causal"] not in _CAUSAL:
        raise ValueError(
            f'{function}: causal ({given["causal"]!r}) must be False, True or "top_left"'
        )
    offset = given["q_offset"]
    if isinstance(offset, np.integer):
        given["q_offset"] = int(offset)
    elif offset is not None and not isinstance(offset, (int, torch.SymInt)):
        given["q_offsets"], given["q_offset"] = offset, None
    for name in ("window", "dropout_shard"):
        if given[name] is not None:
            given[name] = list(given[name])
    for name in _UNSIGNED:
        if given[name] >= 2**63:
            given[name] -= 2**64
    for name in _ARRAYS:
        if given[name] is not None and not isinstance(given[name], torch.Tensor):
            given[name] = torch.as_tensor(given[name])
    return tuple([given[name] for name in _NAMES])


def option_values(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The operators' arguments behind query, key, value by their names."""
    return dict(zip(_NAMES, arguments, strict=True))


def unpack(arguments: tuple[Any, ...]) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The public options that are set; and cu_seqlens_q, cu_seqlens_k, block_table."""
    given = option_values(arguments)
    packed = tuple(given.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "block_table"))
    given["causal"] = _CAUSAL[given["causal"]]
    given["window"] = tuple(given["window"])
    for name in _UNSIGNED:
        given[name] %= 2**64
    for array, name in (("q_offsets", "q_offset"), ("drawn_seed", "dropout_seed")):
        value = given.pop(array)
        if value is not None:
            given[name] = int(value) if array == "drawn_seed" else value
    if given["dropout_shard"] is not None:
        given["dropout_shard"] = DropoutShard(*given["dropout_shard"])
    return {name: x for name, x in given.items() if x is not None}, packed


def _parse(backward: bool, arguments: tuple[Any, ...]) -> tuple[Any, bool]:
    """The core's options, and whether the sequences are packed."""
    options, (cu_seqlens_q, cu_seqlens_k, block_table) = unpack(arguments)
    suffix = "_backward" if backward else ""
    if cu_seqlens_q is None:
        return parse_own(f"attention{suffix}", options), False
    function = f"attention_varlen{suffix}"
    return _varlen.parse_packed(function, cu_seqlens_q, cu_seqlens_k, block_table, options), True


@torch.library.custom_op(
    "flashattn::forward", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)"
)
def forward(query: Any, key: Any, value: Any, *arguments: Any) -> tuple[Any, Any]:
    """(out, lse) of attention, or of attention_varlen where cu_seqlens_q is given."""
    parsed, packed = _parse(False, arguments)
    run = _varlen.forward if packed else _api.forward
    return run(framework_of("attention", query, key, value), query, key, value, parsed, None)


@forward.register_fake
def _(query: Any, key: Any, value: Any, *arguments: Any) -> tuple[Any, Any]:
    given = option_values(arguments)
    if given["cu_seqlens_q"] is not None:
        out, lse = packed_shapes(query.shape, value.shape)
    else:
        out, lse = output_shapes(query.shape, value.shape, given["layout"] == "bhsd")
    return query.new_empty(out), query.new_empty(lse, dtype=torch.float32)


@torch.library.custom_op(
    "flashattn::backward",
    mutates_args=(),
    schema=f"(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, bool[] wanted, {_INPUTS})"
    " -> Tensor[]",
)
def backward(
    dout: Any,
    dlse: Any,
    out: Any,
    lse: Any,
    wanted: Any,
    query: Any,
    key: Any,
    value: Any,
    *arguments: Any,
) -> list[Any]:
    """The wanted gradients of query, key, value, mask, alibi_slopes, sinks, and no others."""
    parsed, _ = _parse(True, arguments)
    framework = framework_of("attention_backward", query, key, value)
    tensors = (query, key, value, parsed.mask, parsed.alibi_slopes, parsed.sinks)
    dout = torch.zeros_like(out) if dout is None else dout
    found = _api.gradients(framework, parsed, dout, dlse, out, lse, tuple(wanted), *tensors)
    return [gradient for gradient in found if gradient is not None]


@backward.register_fake
def _(
    dout: Any,
    dlse: Any,
    out: Any,
    lse: Any,
    wanted: Any,
    query: Any,
    key: Any,
    value: Any,
    *arguments: Any,
) -> list[Any]:
    tensors = (query, key, value, *arguments[:3])
    made = []
    for n, (tensor, want) in enumerate(zip(tensors, wanted, strict=True)):
        if want and tensor is not None:
            wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
            made.append(tensor.new_empty(tensor.shape, dtype=tensor.dtype if n < 3 else wide))
    return made


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    ctx.set_materialize_grads(False)
    ctx.tensors = [n for n, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
    ctx.save_for_backward(*output, *(inputs[n] for n in ctx.tensors))
    ctx.others = [None if isinstance(x, torch.Tensor) else x for x in inputs]


def _gradients(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    inputs = list(ctx.others)
    found: list[Any] = [None] * len(inputs)
    if dout is None and dlse is None:
        return tuple(found)
    out, lse, *tensors = ctx.saved_tensors
    for n, tensor in zip(ctx.tensors, tensors, strict=True):
        inputs[n] = tensor
    # The differentiable inputs lead the arguments.
    wanted = list(ctx.needs_input_grad[:6])
    operator: Any = _TransformedBackward.apply if is_transformed() else backward
    gradients = iter(operator(dout, dlse, out, lse, wanted, *inputs))
    for n, want in enumerate(wanted):
        if want:
            found[n] = next(gradients)
    return tuple(found)


def refuse_second(ctx: Any, *gradients: Any) -> None:
    """The derivative of a gradient.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("attention: a second derivative is not supported")


forward.register_autograd(_gradients, setup_context=_save)
backward.register_autograd(refuse_second)


def _each(operator: Any) -> Any:
    """A vmap rule: one call per example, so that each gives exactly the bits it gives alone."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        def example(n: int) -> Any:
            return operator(
                *(
                    x if x is None or not isinstance(dim, int) else x.select(dim, n)
                    for x, dim in zip(arguments, in_dims, strict=True)
                )
            )

        results = [example(n) for n in range(info.batch_size)]
        stacked = [torch.stack(column) for column in zip(*results, strict=True)]
        zeros = [0] * len(stacked)
        return (stacked, zeros) if operator is backward else (tuple(stacked), tuple(zeros))

    return rule


forward.register_vmap(_each(forward))
backward.register_vmap(_each(backward))


def is_transformed() -> bool:
    """Whether one of functorch's transforms is at work, which cannot differentiate operators."""
    if torch.compiler.is_compiling():  # torch.compile traces the transforms themselves
        return False
    return torch._C._functorch.maybe_current_level() is not None


class _Transformed(torch.autograd.Function):
    """The forward operator as functorch wants it, which cannot differentiate operators."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return forward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return _gradients(ctx, *gradients)


class _TransformedBackward(torch.autograd.Function):
    """Likewise the backward operator; the end of the chain."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Any, ...]:
        return tuple(backward(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Nothing is kept for a derivative that does not exist."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        refuse_second(ctx, *gradients)


def dispatch(
    function: str, query: Any, key: Any, value: Any, options: Mapping[str, Any]
) -> tuple[Any, Any]:
    """(out, lse) through the dispatcher. `options` may hold cu_seqlens_q, ..._k, block_table."""
    if options.get("dropout_p") and "dropout_seed" not in options:
        seed = torch.randint(0, 2**63 - 1, (), device="cpu")
        options = {**options, "drawn_seed": seed}
    inputs = (query, key, value, *pack(function, options))
    operator: Any = _Transformed.apply if is_transformed() else forward
    result: tuple[Any, Any] = operator(*inputs)
    return result


def dispatch_backward(
    function: str, results: Any, tensors: Any, options: Mapping[str, Any]
) -> tuple[Any, ...]:
    """All gradients that there are, through the dispatcher, from (dout, dlse, out, lse)."""
    inputs = (*tensors, *pack(function, options))
    wanted = [x is not None and x.is_floating_point() for x in inputs[:6]]
    found = iter(backward(*results, wanted, *inputs))
    return tuple([next(found) if want else None for want in wanted])
