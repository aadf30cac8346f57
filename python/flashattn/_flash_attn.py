"""The functions of the flash_attn package, with its signatures and return values.

Here are those on whole batches, and what all share; `_flash_attn_varlen` and `_flash_attn_cache`
have the others.

Each is a few lines over `attention`, `attention_varlen`, `attention_kvcache` or `merge_attention`,
which do all the work and all the checking. torch tensors take part in autograd; numpy arrays go
through the forward functions too. What upstream refuses and these allow: float32, softcap together
with dropout, any head_dim, value_dim other than head_dim, pages of any size, CPU and Metal arrays.
`deterministic` and `num_splits` choose among upstream's algorithms; here results are always
deterministic and splits are the backend's choice, so both are accepted and change nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashattn import _core
from flashattn._api import attention, attention_backward, attention_forward
from flashattn._arrays import framework_of
from flashattn._probabilities import signed_probabilities

Pair = tuple[int, int]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn's flash_attn_func: `attention` under upstream's names.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, value_dim).
        dropout_p: probability of dropping an attention weight.
        softmax_scale: default head_dim ** -0.5.
        causal: bottom-right aligned.
        window_size: (left, right), inclusive; -1 is unlimited.
        softcap: 0 is off.
        alibi_slopes: float32 (heads,) or (batch, heads).
        deterministic: accepted; results always are.
        return_attn_probs: also return lse and S_dmask.

    Returns:
        out (batch, seqlen_q, heads, value_dim); with return_attn_probs (out, lse, S_dmask), where
        lse is float32 (batch, heads, seqlen_q) and S_dmask has no elements, or with dropout is the
        (batch, heads, seqlen_q, seqlen_k) softmax, negative where dropped: memory O(T^2) then.

    Raises:
        ValueError: and TypeError, NotImplementedError, RuntimeError, as `attention` does.
    """
    options = upstream_options(dropout_p, softmax_scale, causal, window_size, softcap)
    options |= given(alibi_slopes=alibi_slopes)
    if not return_attn_probs:
        return attention(q, k, v, **options)
    options |= drawn_seed(q, k, v, dropout_p)
    out, lse = attention(q, k, v, return_lse=True, **options)
    return out, lse, signed_probabilities(q, k, options)


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv (batch, seqlen, 3, heads, head_dim), which is read in place."""
    q, k, v = unpack("flash_attn_qkvpacked_func", "qkv", qkv, 2, 3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q and kv (batch, seqlen_k, 2, kv_heads, head_dim)."""
    k, v = unpack("flash_attn_kvpacked_func", "kv", kv, 2, 2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def _flash_attn_forward(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Any,
    return_softmax: bool,
) -> tuple[Any, Any, Any, Any]:
    """flash_attn's _flash_attn_forward, never recorded by autograd.

    Returns:
        (out, lse, S_dmask, rng_state): rng_state is int64 (2,), the drawn seed and offset 0.
    """
    window = (window_size_left, window_size_right)
    options = upstream_options(dropout_p, softmax_scale, causal, window, softcap)
    options |= given(alibi_slopes=alibi_slopes) | drawn_seed(q, k, v, dropout_p)
    out, lse = attention_forward(q, k, v, **options)
    probabilities = signed_probabilities(q, k, options if return_softmax else {})
    state = np.array([options.get("dropout_seed", 0), 0], np.int64)
    return out, lse, probabilities, _like(q, state)


def _flash_attn_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Any,
    deterministic: bool,
    rng_state: Any = None,
) -> Any:
    """flash_attn's _flash_attn_backward: writes dq, dk, dv where they are not None.

    Args:
        dout: gradient of out.
        q: as in the forward call; k, v and the options likewise.
        k: see q.
        v: see q.
        out: the forward call's out.
        softmax_lse: the forward call's lse.
        dq: an array to write, or None.
        dk: likewise.
        dv: likewise.
        dropout_p: see q.
        softmax_scale: see q.
        causal: see q.
        window_size_left: see q.
        window_size_right: see q.
        softcap: see q.
        alibi_slopes: see q; it has no gradient here.
        deterministic: accepted; results always are.
        rng_state: the forward call's; required with dropout.

    Returns:
        softmax_d, float32 (batch, heads, seqlen_q): the sum of dout * out over value_dim.
    """
    window = (window_size_left, window_size_right)
    options = upstream_options(0.0, softmax_scale, causal, window, softcap)
    options |= given(alibi_slopes=alibi_slopes)
    if dropout_p > 0:
        if rng_state is None:
            raise ValueError("_flash_attn_backward: rng_state (None) must be given with dropout")
        seed, offset = (int(x) for x in rng_state)
        options |= {"dropout_p": dropout_p, "dropout_seed": seed, "dropout_offset": offset}
    gradients = attention_backward(dout, q, k, v, out, softmax_lse, **options)
    _core.settle()
    for wanted, found in ((dq, gradients.dq), (dk, gradients.dk), (dv, gradients.dv)):
        if wanted is not None:
            wanted[...] = found
    wide = [x.astype(np.float32) if isinstance(x, np.ndarray) else x.float() for x in (dout, out)]
    return (wide[0] * wide[1]).sum(-1).swapaxes(1, 2)


def upstream_options(
    dropout_p: float, scale: float | None, causal: bool, window: Pair, softcap: float
) -> dict[str, Any]:
    """The options of this package that upstream's mean, those at rest left out."""
    options: dict[str, Any] = {}
    if dropout_p != 0:
        options["dropout_p"] = dropout_p
    if scale is not None:
        options["scale"] = scale
    if causal:
        options["causal"] = True
    if tuple(window) != (-1, -1):
        options["window"] = tuple(window)
    if softcap != 0:
        options["softcap"] = softcap
    return options


def drawn_seed(q: Any, k: Any, v: Any, dropout_p: float) -> dict[str, Any]:
    """A seed for calls that must drop the same weights; nothing without dropout."""
    if dropout_p == 0:
        return {}
    return {"dropout_seed": framework_of("flash_attn", q, k, v).draw_seed()}


def given(**arrays: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: array for name, array in arrays.items() if array is not None}


def unpack(function: str, name: str, packed: Any, axis: int, count: int) -> Any:
    """Views of the parts; torch's gradient of unbind is one array and not one for each part."""
    if packed.ndim != axis + 3 or packed.shape[axis] != count:
        raise ValueError(
            f"{function}: {name}.shape ({tuple(packed.shape)}) must have {axis + 3} axes,"
            f" {count} parts on axis {axis}"
        )
    if hasattr(packed, "unbind"):
        return packed.unbind(axis)
    return [packed[(slice(None),) * axis + (n,)] for n in range(count)]


def _like(array: Any, values: np.ndarray[Any, Any]) -> Any:
    """The values in the framework of `array`."""
    if isinstance(array, np.ndarray):
        return values
    import torch

    return torch.from_numpy(values)
