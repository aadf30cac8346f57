"""One candidate of `tune` in a process of its own: right first, then timed by the GPU's clock.

`work` answers requests of `run_child`: {"slot", "choice", "rounds", "shape": [batch, seqlen,
heads]} gives {"seconds": [...]} or {"error": text}; {"slot", "choices"} checks several and gives
{"wrong": {choice: text}, "pipelines"}.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import flashattn as fa
from flashattn._cli import reference
from flashattn._cli.metal_core import core
from flashattn._cli.problems import numpy_dtype, random_arrays

# (batch, seqlen_q, seqlen_k, query heads, kv heads, options): ragged blocks, grouped heads, causal.
_PROBLEMS: tuple[tuple[int, int, int, int, int, dict[str, Any]], ...] = (
    (1, 70, 93, 2, 1, {"causal": True}),
    (1, 64, 64, 1, 1, {}),
)
_WARM_UP = 2


def work(request: dict[str, Any]) -> dict[str, Any]:
    """The times of a candidate, or what is wrong with it."""
    kind, type_name, tile, _ = request["slot"].split()
    dtype = numpy_dtype(type_name)
    if dtype is None:
        return {"error": f"{type_name} needs ml_dtypes"}
    backward = kind != "forward"
    found = {}
    for choice in request.get("choices") or [request["choice"]]:
        core.metal_use_tuning(f"flashattn tuning 1\n{request['slot']} {choice}\nend\n")
        try:
            wrong = find_wrong(dtype, int(tile), backward)
        except RuntimeError as failure:
            wrong = str(failure)
        if wrong:
            found[choice] = wrong
    if "choices" in request:
        return {"wrong": found, "pipelines": core.metal_pipelines()}
    if found:
        return {"error": found[request["choice"]]}
    batch, seqlen, heads = request["shape"]
    shape = (batch, seqlen, heads, int(tile))
    return {"seconds": _times(shape, dtype, request["rounds"], backward)}


def find_wrong(dtype: Any, head_dim: int, backward: bool) -> str:
    """The first result that is further from float64 than allowed, in words; "" if none is."""
    for batch, seqlen_q, seqlen_k, heads, kv_heads, options in _PROBLEMS:
        shapes: list[tuple[int, ...]] = [
            (batch, seqlen_q, heads, head_dim),
            (batch, seqlen_k, kv_heads, head_dim),
            (batch, seqlen_k, kv_heads, head_dim),
            (batch, seqlen_q, heads, head_dim),
        ]
        q, k, v, dout = arrays = tuple(random_arrays(shapes, dtype, seed=11))
        out, lse = fa.attention_forward(q, k, v, backend="metal", **options)
        got: tuple[Any, ...] = (out, lse)
        if backward:
            got += fa.attention_backward(dout, q, k, v, out, lse, backend="metal", **options)[:3]
        truth = reference.attention(arrays, options)
        plain = reference.plain_errors(arrays, options, dtype, truth)
        for name, result in zip(reference.NAMES, got, strict=False):
            exact = getattr(truth, name)
            error = reference.worst_error(result, exact)
            allowed = reference.allowed_error(name, exact, plain[name], result.dtype)
            if not error <= allowed:
                return f"wrong: {name} is off by {error:.3g}, allowed {allowed:.3g}"
    return ""


def _times(shape: tuple[int, ...], dtype: Any, rounds: int, backward: bool) -> list[float]:
    """Seconds of the GPU's clock for one causal call."""
    q, k, v, dout = random_arrays([shape] * 4, dtype)
    out, lse = fa.attention_forward(q, k, v, causal=True, backend="metal")
    seconds = []
    for _ in range(_WARM_UP + rounds):
        before = core.metal_gpu_seconds()
        if backward:
            fa.attention_backward(dout, q, k, v, out, lse, causal=True, backend="metal")
        else:
            fa.attention_forward(q, k, v, causal=True, backend="metal")
        seconds.append(core.metal_gpu_seconds() - before)
    if not np.isfinite(seconds).all():
        raise RuntimeError("the GPU's clock gives no numbers")
    return seconds[_WARM_UP:]
