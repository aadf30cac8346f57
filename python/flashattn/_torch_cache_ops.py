"""attention_kvcache as operators of torch's dispatcher: one that writes the caches, one that reads.

As `_torch_ops`, for calls that torch traces or dispatches. There is no gradient, and no vmap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flashattn import _kvcache
from flashattn._framework import output_shapes
from flashattn._torch_ops import PARAMETERS, option_values, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Mapping

# Between the caches and the options. Lengths and the like stay on the host, where they are read.
_OWN = {
    "k": "Tensor?",
    "v": "Tensor?",
    "cache_seqlens": "Tensor?",
    "cache_batch_idx": "Tensor?",
    "leftpad": "Tensor?",
    "rotary_cos": "Tensor?",
    "rotary_sin": "Tensor?",
    "rotary_interleaved": "bool",
}
_REST = ", ".join([*(f"{kind} {name}" for name, kind in _OWN.items()), PARAMETERS])
_RESULT = "-> (Tensor, Tensor)"


def _run(query: Any, k_cache: Any, v_cache: Any, *arguments: Any) -> tuple[Any, Any]:
    own = dict(zip(_OWN, arguments, strict=False))
    options, (_, _, block_table) = unpack(arguments[len(own) :])
    return _kvcache.run(query, k_cache, v_cache, block_table=block_table, options=options, **own)


def _shapes(query: Any, k_cache: Any, v_cache: Any, *arguments: Any) -> tuple[Any, Any]:
    heads_first = option_values(arguments[len(_OWN) :])["layout"] == "bhsd"
    out, lse = output_shapes(query.shape, v_cache.shape, heads_first)
    return query.new_empty(out), query.new_empty(lse, dtype=torch.float32)


append_and_attend = torch.library.custom_op(
    "flashattn::append_and_attend",
    _run,
    mutates_args=("k_cache", "v_cache"),
    schema=f"(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, {_REST}) {_RESULT}",
)
attend_to_cache = torch.library.custom_op(
    "flashattn::attend_to_cache",
    _run,
    mutates_args=(),
    schema=f"(Tensor query, Tensor k_cache, Tensor v_cache, {_REST}) {_RESULT}",
)
append_and_attend.register_fake(_shapes)
attend_to_cache.register_fake(_shapes)


def dispatch(tensors: Any, own: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, Any]:
    """(out, lse) through the dispatcher; see Framework.kvcache.

    Raises:
        ValueError: `out` is given.
    """
    if own["out"] is not None:
        raise ValueError(
            "attention_kvcache: out must not be given where torch traces or transforms"
        )
    if options.get("dropout_p") and "dropout_seed" not in options:
        seed = torch.randint(0, 2**63 - 1, (), device="cpu")
        options = {**options, "drawn_seed": seed}
    given = dict(own)
    lengths: Any = given["cache_seqlens"]
    if isinstance(lengths, (int, np.integer, torch.SymInt)) and not isinstance(lengths, bool):
        each: Any = lengths
        shape = (tensors[0].shape[0],)
        given["cache_seqlens"] = torch.full(shape, each, dtype=torch.int64, device="cpu")
    for name in ("cache_seqlens", "cache_batch_idx", "leftpad"):
        if given[name] is not None and not isinstance(given[name], torch.Tensor):
            given[name] = torch.as_tensor(given[name])
    operator: Any = attend_to_cache if given["k"] is None else append_and_attend
    arguments = [given[name] for name in _OWN]
    packed = pack("attention_kvcache", options)
    result: tuple[Any, Any] = operator(*tensors, *arguments, *packed)
    return result
