"""merge_attention: results over disjoint sets of keys become the result over all of them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

from flashattn import _core
from flashattn._arrays import one_framework

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashattn._framework import Framework

_FUNCTION = "merge_attention"


def merge_attention(
    outs: Sequence[Any], lses: Sequence[Any], *, layout: Literal["bshd", "bhsd"] = "bshd"
) -> tuple[Any, Any]:
    """Exact merge of attention results of the same queries over disjoint keys.

    out = sum_p exp(lse_p - lse) out_p with lse = log sum_p exp(lse_p) (docs/math.md): what split-KV
    decoding, ring attention and shared prefixes end with. Sums are float32 and go through the parts
    in order. Differentiable through outs and lses for torch tensors, once (a second derivative
    raises RuntimeError), and for JAX arrays.

    Args:
        outs: parts, each (batch, seqlen_q, heads, dim), or with layout="bhsd" (batch, heads,
            seqlen_q, dim), of one shape, dtype (float32, float16 or bfloat16) and framework, any
            strides. Without a batch axis as in `attention_varlen`, lses too.
        lses: their log-sum-exps, each (batch, heads, seqlen_q) float32. A part with -inf saw no
            key and contributes nothing, whatever its out holds.
        layout: the axes of outs and of the result.

    Returns:
        (out, lse) in the parts' shapes, dtypes and framework; out 0 and lse -inf where every part's
        lse is -inf.

    Raises:
        ValueError: no part, or shapes that differ.
        TypeError: dtypes or frameworks that differ or do not fit.
        NotImplementedError: arrays outside of host memory; torch.func and torch.vmap.
    """
    outs, lses = list(outs), list(lses)
    if not outs:
        raise ValueError(f"{_FUNCTION}: outs (empty) must hold at least one array")
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f'{_FUNCTION}: layout ({layout!r}) must be "bshd" or "bhsd"')
    framework = one_framework(_FUNCTION, "outs[0]", outs[0])
    for name, arrays in (("outs", outs), ("lses", lses)):
        for number, array in enumerate(arrays):
            label = f"{name}[{number}]"
            if one_framework(_FUNCTION, label, array) is not framework:
                raise TypeError(f"{_FUNCTION}: {label} must be of the framework of outs[0]")
    if len(lses) != len(outs):
        raise ValueError(
            f"{_FUNCTION}: lses.length ({len(lses)}) must equal outs.length ({len(outs)})"
        )
    heads_first = layout == "bhsd"
    merged = framework.merge(outs, lses, heads_first)
    if merged is not None:
        return merged
    torch_module = sys.modules.get("flashattn._torch")
    if torch_module is not None and torch_module.records_gradient(*outs, *lses):
        result: tuple[Any, Any] = torch_module.record_merge(framework, outs, lses, heads_first)
        return result
    return run(framework, outs, lses, heads_first)


def run(
    framework: Framework, outs: list[Any], lses: list[Any], heads_first: bool
) -> tuple[Any, Any]:
    """(out, lse) in new arrays."""
    out, lse = framework.gradient(outs[0]), framework.gradient(lses[0])
    _core.merge(outs, lses, out, lse, heads_first)
    return framework.finish(out, outs[0]), framework.finish(lse, outs[0])


def gradients(
    framework: Framework,
    dout: Any,
    dlse: Any,
    wanted: Sequence[bool],
    outs: list[Any],
    lses: list[Any],
    heads_first: bool,
) -> list[Any]:
    """Gradients of all outs and then all lses; None where none is wanted."""
    results = [
        framework.gradient(x) if want else None
        for x, want in zip([*outs, *lses], wanted, strict=True)
    ]
    count = len(outs)
    _core.merge_backward(outs, lses, dout, dlse, results[:count], results[count:], heads_first)
    return results
