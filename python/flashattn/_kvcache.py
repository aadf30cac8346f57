"""attention_kvcache: append to a key-value cache in place and attend to it, in one call."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from flashattn import _core
from flashattn._api import write_results
from flashattn._arrays import framework_of
from flashattn._options import AttentionOptions, documents_options, parse, per_batch_integers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Unpack

    from flashattn._framework import Framework

_FUNCTION = "attention_kvcache"


@documents_options
def attention_kvcache(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: int | Sequence[int] | Any,
    k: Any = None,
    v: Any = None,
    block_table: Any = None,
    cache_batch_idx: Sequence[int] | Any = None,
    leftpad: Sequence[int] | Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = True,
    out: Any = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Any, Any]:
    """Attention of new queries over a cache, after k and v were appended to it in place.

    The convention is that of flash-attn's flash_attn_with_kvcache. Everything is checked before
    anything is written. Never recorded by autograd, and refused where autograd would record.

    Args:
        query: (batch, seqlen_q, query_heads, head_dim), float32, float16 or bfloat16.
        k_cache: (cache_batch, rows, kv_heads, head_dim), any strides; with a block_table pages,
            (num_pages, page_size, kv_heads, head_dim). A numpy array or torch tensor that can be
            written, if there is something to append.
        v_cache: (cache_batch, rows, kv_heads, value_dim), or pages likewise.
        cache_seqlens: rows of the cache in use before this call, one int or int32 / int64
            (batch,) in host memory. Rows behind them are never read into the result.
        k: (batch, seqlen_new, kv_heads, head_dim), appended from row cache_seqlens[b] on, or None.
        v: (batch, seqlen_new, kv_heads, value_dim), with k.
        block_table: int32 or int64 (batch, max_pages) in host memory: row r of entry b lies in page
            block_table[b, r // page_size]. Numbers past the last row in use are not read.
        cache_batch_idx: int32 or int64 (batch,): the index on the caches' batch axis of each entry;
            default 0, 1, ... Not with a block_table.
        leftpad: int32 or int64 (batch,): rows before it do not exist, and positions count from it.
            Column j of a mask is row j of the entry, rows of the padding counted.
        rotary_cos: floating (positions, pairs), pairs <= head_dim / 2: query and k are turned by
            rotary position embeddings (Su et al., "RoFormer", 2021) in float32 before they are
            stored or used. Row t of k stands at cache_seqlens + t - leftpad, and so does query row
            t under causal or a window; else every query row stands where k's row 0 does. Takes k.
        rotary_sin: like rotary_cos.
        rotary_interleaved: pairs are dimensions (0, 1), (2, 3), ...; else (0, pairs), ...
        out: an array to write out into, or a pair (out, lse); as in `attention`.
        **options: as in `attention`; kv_lengths is what cache_seqlens is for:

    Returns:
        (out, lse): (batch, seqlen_q, query_heads, value_dim) in query's dtype and framework, and
        float32 (batch, query_heads, seqlen_q).

    Raises:
        ValueError: shapes or values that do not fit: a full cache, a length or page number out of
            range, two entries that append to one place.
        TypeError: dtypes or kinds that do not fit, a cache that cannot be written.
        NotImplementedError: no backend can do this combination.
        RuntimeError: autograd would have to record this call, or a device failed.
    """
    framework = framework_of(_FUNCTION, query, k_cache, v_cache, ("k_cache", "v_cache"))
    if options.get("kv_lengths") is not None:
        raise ValueError(f"{_FUNCTION}: kv_lengths (given) must be given as cache_seqlens")
    own: dict[str, Any] = {
        "cache_seqlens": cache_seqlens,
        "k": k,
        "v": v,
        "cache_batch_idx": cache_batch_idx,
        "leftpad": leftpad,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotary_interleaved": bool(rotary_interleaved),
        "out": out,
    }
    arrays = (query, k_cache, v_cache)
    learned = (options.get("mask"), options.get("alibi_slopes"), options.get("sinks"))
    _check_gradient(*arrays, k, v, rotary_cos, rotary_sin, *learned)
    found = framework.kvcache(arrays, own, {**options, "block_table": block_table})
    if found is not None:
        return found
    return run(*arrays, block_table=block_table, options=options, **own)


def run(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any,
    k: Any,
    v: Any,
    block_table: Any,
    cache_batch_idx: Any,
    leftpad: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    rotary_interleaved: bool,
    options: Mapping[str, Any],
    out: Any = None,
) -> tuple[Any, Any]:
    """The call itself; arguments as in `attention_kvcache`."""
    framework = framework_of(_FUNCTION, query, k_cache, v_cache, ("k_cache", "v_cache"))
    parsed = parse(_FUNCTION, options)
    if parsed.dropout_p > 0 and "dropout_seed" not in options:
        parsed.dropout_seed = framework.draw_seed()
    if k is not None:
        _check_writable(framework, k_cache=k_cache, v_cache=v_cache)
    lengths, places, starts, table = (
        None if value is None else per_batch_integers(_FUNCTION, name, value)
        for name, value in (
            ("cache_seqlens", _lengths(cache_seqlens, query)),
            ("cache_batch_idx", cache_batch_idx),
            ("leftpad", leftpad),
            ("block_table", block_table),
        )
    )

    def call(out: Any, lse: Any, caller_outputs: bool) -> None:
        _core.kvcache(
            query,
            k_cache,
            v_cache,
            out,
            lse,
            k,
            v,
            lengths,
            places,
            starts,
            table,
            rotary_cos,
            rotary_sin,
            rotary_interleaved,
            parsed,
            caller_outputs,
        )

    outputs = framework.forward_outputs(query, v_cache, parsed.heads_first)
    results = write_results(framework, _FUNCTION, query, out, outputs, call)
    if k is not None:
        framework.written(k_cache, v_cache)
    return results


def _lengths(cache_seqlens: Any, query: Any) -> Any:
    """One number stands for every entry."""
    if isinstance(cache_seqlens, (int, np.integer)) and not isinstance(cache_seqlens, bool):
        return [int(cache_seqlens)] * int(query.shape[0])
    return cache_seqlens


def _check_gradient(*arrays: Any) -> None:
    torch_module = sys.modules.get("flashattn._torch")
    if torch_module is not None and torch_module.records_gradient(*arrays):
        raise RuntimeError(
            f"{_FUNCTION} has no gradient: call it under torch.no_grad(), or on detached tensors"
        )


def _check_writable(framework: Framework, **caches: Any) -> None:
    for name, cache in caches.items():
        if not framework.is_output(cache):
            raise TypeError(
                f"{_FUNCTION}: {name} ({type(cache).__name__}) must be an array that can be written"
            )
