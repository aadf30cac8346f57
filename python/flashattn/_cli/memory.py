"""Peak memory of one attention call above its inputs and outputs, measured in a process of its own.

`work` answers requests of `run_child`. The peak is the kernel's high-water mark of resident memory,
reset just before the call where the system allows it (Linux), else the process's maximum.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import numpy as np

from flashattn._cli.problems import numpy_dtype, random_arrays


def resident_bytes() -> int:
    """Resident memory now; where the system does not tell, the most so far."""
    try:
        with open("/proc/self/statm", encoding="ascii") as text:
            return int(text.read().split()[1]) * resource.getpagesize()
    except OSError:
        return _maximum_bytes()


def _maximum_bytes() -> int:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _reset_peak() -> bool:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as control:
            control.write("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """The most resident memory since the last reset, or since the process began."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _maximum_bytes()


def _naive(q: Any, k: Any, v: Any, dout: Any, causal: bool, backward: bool) -> object:
    """The O(T^2) way in float32: every score of every head at once, as unfused code does."""
    q, k, v, dout = (
        x.transpose(0, 2, 1, 3).astype(np.float32, copy=False) for x in (q, k, v, dout)
    )
    scale = np.float32(q.shape[-1] ** -0.5)
    p = (q * scale) @ k.swapaxes(-1, -2)
    if causal:
        above = np.triu(np.ones(p.shape[-2:], bool), 1 + p.shape[-1] - p.shape[-2])
        p[..., above] = -np.inf
    p -= p.max(axis=-1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    out = p @ v
    if not backward:
        return out
    ds = dout @ v.swapaxes(-1, -2)
    ds -= (p * ds).sum(axis=-1, keepdims=True)
    ds *= p
    dk, dv = ds.swapaxes(-1, -2) @ (q * scale), p.swapaxes(-1, -2) @ dout
    return out, (ds @ k) * scale, dk, dv


def work(request: dict[str, Any]) -> dict[str, Any]:
    """{"extra_bytes": peak above what was resident before the call, "exact": whether it was reset}.

    request: way ("flashattn" or "naive"), shape (batch, seqlen, heads, head_dim), dtype (float32
    unless given; the naive way computes in float32 whatever it is), causal, and passes: "forward",
    "backward" (not the naive way), or "both" in a row, in which what the forward keeps for its next
    call counts too.
    """
    import flashattn as fa

    shape, causal = tuple(request["shape"]), request["causal"]
    q, k, v, dout = random_arrays([shape] * 4, numpy_dtype(request.get("dtype", "float32")))
    # Libraries, thread stacks and pools belong to the process, not to the call.
    small_q, small_k, small_v, small_dout = (x[:, :64, :1].copy() for x in (q, k, v, dout))
    out, lse = fa.attention_forward(small_q, small_k, small_v, causal=causal)
    fa.attention_backward(small_dout, small_q, small_k, small_v, out, lse, causal=causal)
    _naive(small_q, small_k, small_v, small_dout, causal, True)
    # Resident before the call, so that they do not count: results of the flash way.
    out = np.ones(shape, q.dtype)
    lse = np.ones((shape[0], shape[2], shape[1]), np.float32)
    passes = request["passes"]
    if passes == "backward":
        fa.attention_forward(q, k, v, causal=causal, out=(out, lse))
    exact = _reset_peak()
    before = resident_bytes()
    results = 0 if passes == "forward" else 3 * q.nbytes  # dq, dk and dv
    if request["way"] == "naive":
        results = (1 if passes == "forward" else 4) * q.size * 4  # out too, all float32
        _naive(q, k, v, dout, causal, passes != "forward")
    if request["way"] == "flashattn" and passes != "backward":
        fa.attention_forward(q, k, v, causal=causal, out=(out, lse))
    if request["way"] == "flashattn" and passes != "forward":
        fa.attention_backward(dout, q, k, v, out, lse, causal=causal)
    return {"extra_bytes": max(0, peak_bytes() - before - results), "exact": exact}
