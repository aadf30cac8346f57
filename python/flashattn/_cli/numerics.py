"""The problems of `check`, computed by one backend and instruction set in a process of its own.

`work` answers requests of `run_child`: {"backend", "isa" or null} gives one record per problem and
result, with its error against float64 and what is allowed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashattn._cli import reference
from flashattn._cli.metal_core import core
from flashattn._cli.problems import numpy_dtype, random_arrays

DTYPES = ("float32", "float16", "bfloat16")

# name: (batch, seqlen_q, seqlen_k, query_heads, kv_heads, head_dim, value_dim), options
_CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "full": ((1, 200, 200, 2, 2, 64, 64), {}),
    "causal": ((1, 333, 333, 2, 2, 64, 64), {"causal": True}),
    "causal, long key": ((1, 65, 300, 2, 2, 64, 64), {"causal": True}),
    "causal, short key": ((1, 300, 65, 1, 1, 64, 64), {"causal": True}),
    "causal top left": ((1, 100, 150, 1, 1, 64, 64), {"causal": "top_left"}),
    "grouped heads": ((2, 129, 129, 6, 2, 32, 32), {"causal": True}),
    "odd dims": ((1, 77, 131, 2, 1, 40, 72), {}),
    "dim 1": ((1, 33, 17, 1, 1, 1, 1), {}),
    "dim 256": ((1, 70, 70, 1, 1, 256, 256), {"causal": True}),
    "window": ((1, 300, 300, 1, 1, 64, 64), {"window": (40, 7)}),
    "key lengths": ((3, 65, 140, 1, 1, 64, 64), {"kv_lengths": [140, 63, 0], "causal": True}),
    "offset": ((1, 64, 200, 1, 1, 64, 64), {"causal": True, "q_offset": 100}),
    "scale": ((1, 90, 90, 1, 1, 64, 64), {"scale": -0.5}),
    "decode": ((2, 1, 1000, 8, 2, 128, 128), {}),
    "decode causal": ((1, 3, 700, 4, 2, 64, 64), {"causal": True}),
}


def _strided(array: Any) -> Any:
    """The same values behind gaps: every other row of a larger buffer, last axis contiguous."""
    larger = np.zeros((array.shape[0], 2 * array.shape[1], *array.shape[2:]), array.dtype)
    larger[:, ::2] = array
    return larger[:, ::2]


def work(request: dict[str, Any]) -> dict[str, Any]:
    """Records of every case and dtype with {"case", "dtype", "result", "error", "allowed"}."""
    import flashattn as fa
    from flashattn import _core

    if request["isa"]:
        _core.set_isa(request["isa"])
    records, skipped = [], []
    for name in DTYPES:
        dtype = numpy_dtype(name)
        if dtype is None:
            skipped.append(f"{name}: needs ml_dtypes")
            continue
        for case in _CASES:
            records += [
                {"case": case, "dtype": name, **record}
                for record in _case_records(case, dtype, request["backend"])
            ]
    pipelines = core.metal_pipelines() if hasattr(core, "metal_pipelines") else []
    return {
        "records": records,
        "isa": _core.active_isa(),
        "skipped": skipped,
        "pipelines": pipelines,
        # As it is after the calls: kernels that a GPU refused have made way by now.
        "device": next(i.device for i in fa.backends() if i.name == request["backend"]),
    }


def _case_records(case: str, dtype: Any, backend: str) -> list[dict[str, Any]]:
    import flashattn as fa

    (batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, value_dim), options = _CASES[case]
    shapes: list[tuple[int, ...]] = [
        (batch, seqlen_q, heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim),
        (batch, seqlen_k, kv_heads, value_dim),
        (batch, seqlen_q, heads, value_dim),
    ]
    q, k, v, dout = (_strided(x) for x in random_arrays(shapes, dtype, seed=7))
    out, lse = fa.attention_forward(q, k, v, backend=backend, **options)
    dq, dk, dv = fa.attention_backward(dout, q, k, v, out, lse, backend=backend, **options)[:3]
    arrays = (q, k, v, dout)
    truth = reference.attention(arrays, options)
    plain = reference.plain_errors(arrays, options, dtype, truth)
    records = []
    for name, got in zip(reference.NAMES, (out, lse, dq, dk, dv), strict=True):
        exact = getattr(truth, name)
        error = reference.worst_error(got, exact)
        record = {
            "result": name,
            # JSON has no infinity; None is a NaN or a lone infinity, which nothing allows.
            "error": error if np.isfinite(error) else None,
            "allowed": reference.allowed_error(name, exact, plain[name], got.dtype),
        }
        records.append(record)
    return records
