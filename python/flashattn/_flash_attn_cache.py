"""The functions of the flash_attn package on caches and partial results.

`_flash_attn` says what is common to all of its functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashattn._flash_attn import Pair, given, upstream_options
from flashattn._kvcache import attention_kvcache
from flashattn._merge import merge_attention


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """flash_attn's flash_attn_with_kvcache: `attention_kvcache` under upstream's names.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k_cache: (cache_batch, rows, kv_heads, head_dim), or pages with a block_table.
        v_cache: like k_cache.
        k: (batch, seqlen_new, kv_heads, head_dim), appended in place, or None.
        v: with k.
        rotary_cos: (positions, rotary_dim / 2).
        rotary_sin: like rotary_cos.
        cache_seqlens: an int or int32 (batch,): rows in use. None: all of them, nothing to append.
        cache_batch_idx: int32 (batch,).
        cache_leftpad: int32 (batch,).
        block_table: int32 (batch, max_pages).
        softmax_scale: as in `flash_attn_func`; causal, window_size, softcap, alibi_slopes too.
        causal: see softmax_scale.
        window_size: see softmax_scale.
        softcap: see softmax_scale.
        rotary_interleaved: pairs are dimensions (0, 1), (2, 3), ...
        alibi_slopes: see softmax_scale.
        num_splits: accepted; how keys are split is the backend's choice.
        return_softmax_lse: also return lse.

    Returns:
        out, or (out, lse) with lse float32 (batch, heads, seqlen_q).

    Raises:
        ValueError: and TypeError, NotImplementedError, RuntimeError, as `attention_kvcache` does.
    """
    if cache_seqlens is None:
        if k is not None:
            raise ValueError(
                "flash_attn_with_kvcache: cache_seqlens (None) must be given with k and v"
            )
        rows = k_cache.shape[1]
        cache_seqlens = rows if block_table is None else rows * block_table.shape[1]
    options = upstream_options(0.0, softmax_scale, causal, window_size, softcap)
    out, lse = attention_kvcache(
        q,
        k_cache,
        v_cache,
        k=k,
        v=v,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        cache_batch_idx=cache_batch_idx,
        leftpad=cache_leftpad,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        **options,
        **given(alibi_slopes=alibi_slopes),
    )
    return (out, lse) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Any, lse_partial: Any, out: Any = None, out_dtype: Any = None
) -> tuple[Any, Any]:
    """flash_attn's flash_attn_combine: `merge_attention` of stacked parts.

    Args:
        out_partial: (splits, batch, seqlen, heads, dim).
        lse_partial: float32 (splits, batch, seqlen, heads).
        out: an array to write the result into.
        out_dtype: dtype of the result; default out_partial's.

    Returns:
        (out, lse): (batch, seqlen, heads, dim), and float32 (batch, seqlen, heads).

    Raises:
        ValueError: and TypeError, as `merge_attention` does.
    """
    count = out_partial.shape[0]
    merged, lse = merge_attention(
        [out_partial[n] for n in range(count)],
        [lse_partial[n].swapaxes(-1, -2) for n in range(count)],
    )
    if out_dtype is not None:
        merged = (
            merged.astype(out_dtype) if isinstance(merged, np.ndarray) else merged.to(out_dtype)
        )
    if out is not None:
        out[...] = merged
        merged = out
    return merged, lse.swapaxes(-1, -2)
