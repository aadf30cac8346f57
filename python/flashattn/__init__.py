"""Exact attention, forward and backward, for CPUs and Apple GPUs.

>>> import numpy as np, flashattn as fa
>>> q = k = v = np.ones((1, 128, 8, 64), np.float32)   # (batch, seqlen, heads, head_dim)
>>> fa.attention(q, k, v, causal=True).shape
(1, 128, 8, 64)

The score matrix is never stored: memory grows with the sequence, not with its square. Arrays of
numpy, torch, JAX and MLX go in and come out, and take part in the automatic differentiation of
theirs. docs/math.md has the rules that every backend keeps.
"""

from flashattn import metal
from flashattn._alibi import alibi_slopes
from flashattn._api import (
    AttentionGradients,
    attention,
    attention_backward,
    attention_forward,
)
from flashattn._arrays import empty
from flashattn._core import VERSION
from flashattn._dropout import dropout_mask
from flashattn._flash_attn import _flash_attn_backward as _flash_attn_backward
from flashattn._flash_attn import _flash_attn_forward as _flash_attn_forward
from flashattn._flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from flashattn._flash_attn_cache import flash_attn_combine, flash_attn_with_kvcache
from flashattn._flash_attn_varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashattn._kvcache import attention_kvcache
from flashattn._machine import (
    BackendInfo,
    CopyStats,
    backends,
    copy_stats,
    get_num_threads,
    set_num_threads,
    show_config,
)
from flashattn._merge import merge_attention
from flashattn._options import DropoutShard
from flashattn._varlen import attention_varlen, attention_varlen_backward

__version__ = VERSION

__all__ = [
    "AttentionGradients",
    "BackendInfo",
    "CopyStats",
    "DropoutShard",
    "__version__",
    "alibi_slopes",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_kvcache",
    "attention_varlen",
    "attention_varlen_backward",
    "backends",
    "copy_stats",
    "dropout_mask",
    "empty",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_num_threads",
    "merge_attention",
    "metal",
    "set_num_threads",
    "show_config",
]
