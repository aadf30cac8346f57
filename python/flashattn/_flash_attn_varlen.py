"""The functions of the flash_attn package on packed sequences, over `attention_varlen`.

`_flash_attn` says what is common to all of its functions.
"""

from __future__ import annotations

from typing import Any

from flashattn._flash_attn import Pair, drawn_seed, given, unpack, upstream_options
from flashattn._probabilities import signed_probabilities
from flashattn._varlen import attention_varlen


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """flash_attn's flash_attn_varlen_func: `attention_varlen` under upstream's names.

    Args:
        q: (total_q, heads, head_dim).
        k: (total_k, kv_heads, head_dim), or pages with a block_table.
        v: like k.
        cu_seqlens_q: int32 (batch + 1,).
        cu_seqlens_k: int32 (batch + 1,).
        max_seqlen_q: accepted; the lengths are those of cu_seqlens_q.
        max_seqlen_k: likewise.
        dropout_p: as in `flash_attn_func`, and what follows too.
        softmax_scale: see dropout_p.
        causal: see dropout_p.
        window_size: see dropout_p.
        softcap: see dropout_p.
        alibi_slopes: see dropout_p.
        deterministic: see dropout_p.
        return_attn_probs: also return lse and S_dmask.
        block_table: int32 (batch, max_pages).

    Returns:
        out (total_q, heads, value_dim); with return_attn_probs (out, lse, S_dmask), where lse is
        float32 (heads, total_q) and S_dmask has no elements, or with dropout is
        (batch, heads, longest seqlen_q, longest seqlen_k).

    Raises:
        ValueError: and TypeError, NotImplementedError, RuntimeError, as `attention_varlen` does.
    """
    options = upstream_options(dropout_p, softmax_scale, causal, window_size, softcap)
    options |= given(alibi_slopes=alibi_slopes, block_table=block_table)
    if return_attn_probs:
        options |= drawn_seed(q, k, v, dropout_p)
    out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    if not return_attn_probs:
        return out
    return out, lse, signed_probabilities(q, k, options, cu_seqlens_q, cu_seqlens_k)


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of qkv (total, 3, heads, head_dim)."""
    q, k, v = unpack("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 1, 3)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q and kv (total_k, 2, kv_heads, head_dim)."""
    k, v = unpack("flash_attn_varlen_kvpacked_func", "kv", kv, 1, 2)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
