"""The attention calls: options, outputs in the caller's framework, and one call into the core."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from flashattn import _core
from flashattn._arrays import framework_of
from flashattn._framework import Framework
from flashattn._options import AttentionOptions, documents_options, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Unpack

_FORWARD = "attention"
_BACKWARD = "attention_backward"


class AttentionGradients(NamedTuple):
    """Gradients in the shapes of their inputs; None where the call had no such input."""

    dq: Any
    dk: Any
    dv: Any
    dmask: Any = None
    dalibi_slopes: Any = None
    dsinks: Any = None


@documents_options
def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    return_lse: bool = False,
    out: Any = None,
    **options: Unpack[AttentionOptions],
) -> Any:
    """softmax(scale * query key^T) value, without ever storing the score matrix.

    FlashAttention (Dao, Fu, Ermon, Rudra, Re, NeurIPS 2022; Dao, ICLR 2024): exact, in memory
    linear in the sequence length, and the same bits for any number of threads and any batch mates.
    Differentiable for torch tensors, JAX and MLX arrays, once: a second derivative raises
    RuntimeError. Autocast casts query, key and value as it does for torch's own attention;
    torch.compile, torch.export and torch.func see one operator, and so do JAX's transforms
    (flashattn.jax); flashattn.mlx says which of MLX's do.

    Args:
        query: (batch, seqlen_q, query_heads, head_dim), float32, float16 or bfloat16. With
            layout="bhsd" the seqlen and heads axes change places, here and below. Any strides.
        key: (batch, seqlen_k, kv_heads, head_dim); query_heads is a multiple of kv_heads, and query
            head h uses key head h // (query_heads // kv_heads).
        value: (batch, seqlen_k, kv_heads, value_dim).
        return_lse: also return lse.
        out: an array to write the result into, or a pair (out, lse) of such. Not for frameworks
            whose arrays must not change (JAX, MLX), and not where autograd records a gradient.
        **options: as follows; they all combine, and none is ever silently dropped.

    Returns:
        out, (batch, seqlen_q, query_heads, value_dim) in query's dtype and framework; with
        return_lse the pair (out, lse), where lse (batch, query_heads, seqlen_q) is float32: the
        natural logarithm of the sum of exp(scores). A row that sees no key gives out 0, lse -inf.
        Results of arrays in Metal memory (DLPack's kDLMetal) are there too: in query's framework
        where that imports such memory, else DLPack producers with a `numpy()` view.

    Raises:
        ValueError: shapes or values that do not fit; the text names argument, got and expected.
        TypeError: dtypes or kinds that do not fit.
        NotImplementedError: no backend can do this combination; the text has each one's reason.
        RuntimeError: a device failed.
    """
    framework = framework_of(_FORWARD, query, key, value)
    if framework.is_special(query, key, value):
        query, key, value = framework.autocast(query, key, value)
        if framework.is_dispatched(query, key, value):
            result, lse = framework.dispatch(_FORWARD, query, key, value, out, options)
            return (result, lse) if return_lse else result
    parsed = parse(_FORWARD, options)
    if parsed.dropout_p > 0 and "dropout_seed" not in options:
        parsed.dropout_seed = framework.draw_seed()
    torch_module = sys.modules.get("flashattn._torch")
    if torch_module is not None and torch_module.records_gradient(
        query, key, value, parsed.mask, parsed.alibi_slopes, parsed.sinks
    ):
        if out is not None:
            raise ValueError(f"{_FORWARD}: out must not be given where autograd records")
        result, lse = record(framework, forward, query, key, value, parsed)
    else:
        result, lse = forward(framework, query, key, value, parsed, out)
    return (result, lse) if return_lse else result


@documents_options
def attention_forward(
    query: Any, key: Any, value: Any, *, out: Any = None, **options: Unpack[AttentionOptions]
) -> tuple[Any, Any]:
    """The pair (out, lse) of `attention`, never recorded by autograd.

    Args:
        query: as in `attention`, key, value and errors too.
        key: see query.
        value: see query.
        out: as in `attention`.
        **options: as follows; dropout_seed is required when dropout_p > 0, because
            attention_backward needs the same one.

    Returns:
        (out, lse): (batch, seqlen_q, query_heads, value_dim) in query's dtype, and float32
        (batch, query_heads, seqlen_q).
    """
    framework = framework_of(_FORWARD, query, key, value)
    tensors = (query, key, value)
    if framework.is_special(*tensors) and framework.is_dispatched(*tensors):
        check_seed("attention_forward", options.get("dropout_p", 0.0), options)
        return framework.dispatch_raw("attention_forward", tensors, out, options)
    parsed = _parse_with_seed("attention_forward", options)
    return forward(framework, query, key, value, parsed, out)


@documents_options
def attention_backward(
    dout: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    dlse: Any = None,
    **options: Unpack[AttentionOptions],
) -> AttentionGradients:
    """Gradients of attention_forward, from its own results. Deterministic.

    Args:
        dout: gradient of out, in out's shape and dtype.
        query: as in the forward call; key and value likewise.
        key: see query.
        value: see query.
        out: the forward call's out.
        lse: the forward call's lse.
        dlse: gradient of lse, float32 (batch, query_heads, seqlen_q), or None for zero.
        **options: exactly those of the forward call:

    Weights are computed again from lse, which is float32. On Metal those of a row are off by
    abs(lse) * 2**-24, and n times too large where all n keys of a row are masked with float32's
    least value; the CPU corrects both (docs/tolerances.md).

    Returns:
        AttentionGradients. dmask is float32 (float64 for a float64 mask) and None for a bool mask.

    Raises:
        ValueError: and TypeError, NotImplementedError, RuntimeError, as `attention` does.
    """
    framework = framework_of(_BACKWARD, query, key, value)
    if framework.is_special(query, key, value) and framework.is_dispatched(query, key, value):
        check_seed(_BACKWARD, options.get("dropout_p", 0.0), options)
        results = (dout, dlse, out, lse)
        found = framework.dispatch_backward(_BACKWARD, results, (query, key, value), options)
        return AttentionGradients(*found)
    parsed = _parse_with_seed(_BACKWARD, options)
    wanted = gradients_wanted(parsed)
    tensors = (query, key, value, parsed.mask, parsed.alibi_slopes, parsed.sinks)
    return AttentionGradients(*gradients(framework, parsed, dout, dlse, out, lse, wanted, *tensors))


def gradients_wanted(options: _core.Options) -> tuple[bool, ...]:
    """All of query, key, value, mask, alibi_slopes, sinks but a bool mask's."""
    mask = options.mask is not None and not _is_bool(options.mask)
    return (True, True, True, mask, True, True)


def _parse_with_seed(function: str, options: Mapping[str, Any]) -> _core.Options:
    parsed = parse(function, options)
    check_seed(function, parsed.dropout_p, options)
    return parsed


def check_seed(function: str, dropout_p: float, options: Mapping[str, Any]) -> None:
    """Raw calls do not draw: forward and backward must have the same seed."""
    if dropout_p > 0 and "dropout_seed" not in options:
        raise ValueError(f"{function}: dropout_seed (not given) must be given when dropout_p > 0")


def _is_bool(mask: Any) -> bool:
    return str(getattr(mask, "dtype", "")).rpartition(".")[2] == "bool"


def forward(
    framework: Framework, query: Any, key: Any, value: Any, options: _core.Options, given: Any
) -> tuple[Any, Any]:
    outputs = framework.forward_outputs(query, value, options.heads_first)
    return run_forward(framework, _FORWARD, query, key, value, options, given, outputs)


def run_forward(
    framework: Framework,
    function: str,
    query: Any,
    key: Any,
    value: Any,
    options: _core.Options,
    given: Any,
    outputs: tuple[Any, Any],
) -> tuple[Any, Any]:
    """One forward call into `outputs`, or into the caller's `out` where `given`."""

    def call(out: Any, lse: Any, caller_outputs: bool) -> None:
        _core.forward(query, key, value, out, lse, options, caller_outputs)

    return write_results(framework, function, query, given, outputs, call)


def write_results(
    framework: Framework,
    function: str,
    query: Any,
    given: Any,
    outputs: tuple[Any, Any],
    call: Callable[[Any, Any, bool], None],
) -> tuple[Any, Any]:
    """`call(out, lse, whether they are a user's)` with `outputs`, or `given` in their place."""
    out, lse = outputs
    if given is None:
        call(out, lse, False)
        return framework.finish(out, query), framework.finish(lse, query)
    if isinstance(given, tuple) and len(given) == 2:
        out, lse = given
    else:
        out = given
    for name, array in (("out", out), ("lse", lse)):
        if not framework.is_output(array):
            raise TypeError(
                f"{function}: {name} ({type(array).__name__}) must be an array of query's "
                "framework that can be written"
            )
    call(out, lse, True)
    return out, lse


def gradients(
    framework: Framework,
    options: _core.Options,
    dout: Any,
    dlse: Any,
    out: Any,
    lse: Any,
    wanted: tuple[bool, ...],
    *tensors: Any,
) -> list[Any]:
    """Gradients of query, key, value, mask, alibi_slopes, sinks; None: not wanted, or no input."""
    makers = (framework.gradient,) * 3 + (framework.wide_gradient,) * 3
    # What is no array has no shape for its gradient; the core refuses it by name.
    results = [
        make(tensor)
        if want and (hasattr(tensor, "shape") or hasattr(tensor, "__dlpack__"))
        else None
        for make, tensor, want in zip(makers, tensors, wanted, strict=True)
    ]
    query, key, value = tensors[:3]
    dq, dk, dv, dmask, dalibi_slopes, dsinks = results
    _core.backward(
        query, key, value, out, lse, dout, dlse, dq, dk, dv, dmask, dalibi_slopes, dsinks, options
    )
    return [None if array is None else framework.finish(array, query) for array in results]


def record(
    framework: Framework,
    forward: Callable[..., tuple[Any, Any]],
    query: Any,
    key: Any,
    value: Any,
    options: _core.Options,
) -> tuple[Any, Any]:
    """The call as one node of torch's graph; `forward` is the one here or has its arguments."""
    from flashattn._torch import AttentionFunction

    named = {"query": query, "key": key, "value": value, "mask": options.mask}
    named |= {"alibi_slopes": options.alibi_slopes, "sinks": options.sinks}
    for name, tensor in named.items():
        if tensor is not None and not isinstance(tensor, sys.modules["torch"].Tensor):
            raise TypeError(
                f"{_FORWARD}: {name} ({type(tensor).__name__}) must be a torch tensor where "
                "autograd records"
            )

    def run(query: Any, key: Any, value: Any, *_: Any) -> tuple[Any, Any]:
        return forward(framework, query, key, value, options, None)

    def backward(*arguments: Any) -> list[Any]:
        return gradients(framework, options, *arguments)

    result: tuple[Any, Any] = AttentionFunction.apply(run, backward, *named.values())  # type: ignore[no-untyped-call]
    return result
