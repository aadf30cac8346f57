"""attention_varlen: sequences of different lengths, one behind the other in one array."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from flashattn._api import (
    AttentionGradients,
    check_seed,
    gradients,
    gradients_wanted,
    record,
    run_forward,
)
from flashattn._arrays import framework_of
from flashattn._options import AttentionOptions, documents_options, parse_own, per_batch_integers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

    from flashattn._core import Options
    from flashattn._framework import Framework

_FORWARD = "attention_varlen"
_BACKWARD = "attention_varlen_backward"


@documents_options
def attention_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Sequence[int] | Any,
    cu_seqlens_k: Sequence[int] | Any,
    *,
    block_table: Any = None,
    out: Any = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Any, Any]:
    """`attention` of packed sequences: sequence b's queries see sequence b's keys and no others.

    All sequences are one call: none of them is padded, and many short ones cost what their rows
    cost. Each gives the bits of `attention` on it alone. Differentiable as `attention` is.
    The convention is that of flash-attn's flash_attn_varlen_func.

    Args:
        query: (total_q, query_heads, head_dim), float32, float16 or bfloat16, any strides. Rows
            past cu_seqlens_q[-1] belong to no sequence: they are not read into any result, give
            out 0 and lse -inf, and their gradients are 0. Likewise the rows of key and value.
        key: (total_k, kv_heads, head_dim).
        value: (total_k, kv_heads, value_dim).
        cu_seqlens_q: int32 or int64 (batch + 1,) in host memory, or a sequence of ints: sequence b
            is query rows cu_seqlens_q[b] up to cu_seqlens_q[b + 1]. Starts at 0 and never falls;
            a sequence may be empty, on either side.
        cu_seqlens_k: the same for key and value.
        block_table: int32 or int64 (batch, max_pages): keys lie in pages then, key and value being
            (num_pages, page_size, kv_heads, dim), and cu_seqlens_k tells lengths alone. It has no
            gradient.
        out: an array to write out into, or a pair (out, lse); as in `attention`.
        **options: as in `attention`, per sequence: causal and window align each sequence on its
            own, kv_lengths, q_offset and the rows of alibi_slopes are one per sequence. Dropout
            numbers sequence b like batch entry b of the padded batch, whose sizes are the longest
            sequences'. mask and layout="bhsd" have no meaning here and are refused.

    Returns:
        (out, lse): (total_q, query_heads, value_dim) in query's dtype and framework, and float32
        (query_heads, total_q).

    Raises:
        ValueError: shapes or values that do not fit; the text names argument, got and expected.
        TypeError: dtypes or kinds that do not fit.
        NotImplementedError: a mask, or no backend can do this combination.
        RuntimeError: a device failed.
    """
    framework = framework_of(_FORWARD, query, key, value)
    if framework.is_special(query, key, value):
        query, key, value = framework.autocast(query, key, value)
        if framework.is_dispatched(query, key, value):
            packed = {
                "cu_seqlens_q": cu_seqlens_q,
                "cu_seqlens_k": cu_seqlens_k,
                "block_table": block_table,
            }
            return framework.dispatch(_FORWARD, query, key, value, out, {**options, **packed})
    parsed = parse_packed(_FORWARD, cu_seqlens_q, cu_seqlens_k, block_table, options)
    if parsed.dropout_p > 0 and "dropout_seed" not in options:
        parsed.dropout_seed = framework.draw_seed()
    torch_module = sys.modules.get("flashattn._torch")
    if torch_module is not None and torch_module.records_gradient(
        query, key, value, parsed.alibi_slopes, parsed.sinks
    ):
        if out is not None:
            raise ValueError(f"{_FORWARD}: out must not be given where autograd records")
        return record(framework, forward, query, key, value, parsed)
    return forward(framework, query, key, value, parsed, out)


@documents_options
def attention_varlen_backward(
    dout: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Sequence[int] | Any,
    cu_seqlens_k: Sequence[int] | Any,
    dlse: Any = None,
    **options: Unpack[AttentionOptions],
) -> AttentionGradients:
    """Gradients of attention_varlen, from its own results. Deterministic.

    Args:
        dout: gradient of out, in out's shape and dtype.
        query: as in the forward call; key, value, cu_seqlens_q and cu_seqlens_k likewise.
        key: see query.
        value: see query.
        out: the forward call's out.
        lse: the forward call's lse.
        cu_seqlens_q: see query.
        cu_seqlens_k: see query.
        dlse: gradient of lse, float32 (query_heads, total_q), or None for zero.
        **options: exactly those of the forward call; dropout_seed is required with dropout_p > 0:

    Returns:
        AttentionGradients, 0 in the rows that belong to no sequence.

    Raises:
        ValueError: and TypeError, NotImplementedError, RuntimeError, as `attention_varlen` does.
    """
    framework = framework_of(_BACKWARD, query, key, value)
    if framework.is_special(query, key, value) and framework.is_dispatched(query, key, value):
        check_seed(_BACKWARD, options.get("dropout_p", 0.0), options)
        packed = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, **options}
        results = (dout, dlse, out, lse)
        found = framework.dispatch_backward(_BACKWARD, results, (query, key, value), packed)
        return AttentionGradients(*found)
    parsed = parse_packed(_BACKWARD, cu_seqlens_q, cu_seqlens_k, None, options)
    check_seed(_BACKWARD, parsed.dropout_p, options)
    tensors = (query, key, value, parsed.mask, parsed.alibi_slopes, parsed.sinks)
    wanted = gradients_wanted(parsed)
    return AttentionGradients(*gradients(framework, parsed, dout, dlse, out, lse, wanted, *tensors))


def parse_packed(
    function: str, cu_seqlens_q: Any, cu_seqlens_k: Any, block_table: Any, options: Any
) -> Options:
    """The core's options of a call on packed sequences; not shared with another call."""
    parsed = parse_own(function, options)
    if parsed.heads_first:
        raise ValueError(
            f"{function}: layout ('bhsd') must be 'bshd': packed sequences have no batch axis"
        )
    for name, value in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if value is None:
            raise TypeError(f"{function}: {name} (None) must be an array of integers")
        setattr(parsed, name, per_batch_integers(function, name, value))
    if block_table is not None:
        parsed.block_table = per_batch_integers(function, "block_table", block_table)
    return parsed


def forward(
    framework: Framework, query: Any, key: Any, value: Any, options: Options, given: Any
) -> tuple[Any, Any]:
    """One forward call on packed sequences, into new arrays or the caller's `given`."""
    outputs = framework.packed_outputs(query, value)
    return run_forward(framework, _FORWARD, query, key, value, options, given, outputs)
