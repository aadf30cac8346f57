"""One side of a speed comparison, timed in a process of its own.

`work` answers requests of `run_child`: it builds the arrays for each cell, warms up, and returns
the median time of a few runs. Both clocks are reported: wall time, and this process's processor
time, which other processes on the machine disturb least.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from flashattn._cli.problems import numpy_dtype, random_arrays

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[[], object]


def work(request: dict[str, Any]) -> dict[str, Any]:
    """{"times": [{"wall", "cpu"} in seconds for each cell]}.

    request: side ("flashattn" or "torch"), threads, seconds (to spend on each cell), and cells,
    each with shape (batch, seqlen, heads, head_dim), dtype, causal, backward.
    """
    build = {"flashattn": _flashattn_call, "torch": _torch_call}[request["side"]]
    times = [
        measure(build(cell, request["threads"]), request["seconds"]) for cell in request["cells"]
    ]
    return {"times": times}


def measure(call: Call, seconds: float) -> dict[str, float]:
    """Medians over about `seconds` of runs, at least three, after one to warm up."""
    call()
    wall: list[float] = []
    cpu: list[float] = []
    end = time.perf_counter() + seconds
    while len(wall) < 3 or time.perf_counter() < end:
        start, start_cpu = time.perf_counter(), time.process_time()
        call()
        cpu.append(time.process_time() - start_cpu)
        wall.append(time.perf_counter() - start)
    return {"wall": statistics.median(wall), "cpu": statistics.median(cpu)}


def _flashattn_call(cell: dict[str, Any], threads: int) -> Call:
    import flashattn as fa

    fa.set_num_threads(threads)
    q, k, v, dout = random_arrays([tuple(cell["shape"])] * 4, numpy_dtype(cell["dtype"]))
    causal = cell["causal"]
    out, lse = fa.attention_forward(q, k, v, causal=causal)
    if cell["backward"]:
        return lambda: fa.attention_backward(dout, q, k, v, out, lse, causal=causal)
    return lambda: fa.attention_forward(q, k, v, causal=causal)


def _torch_call(cell: dict[str, Any], threads: int) -> Call:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(threads)
    dtype = getattr(torch, cell["dtype"])
    arrays = random_arrays([tuple(cell["shape"])] * 4, "float32")
    # The same memory as ours, (batch, seqlen, heads, dim), seen in torch's axis order.
    q, k, v, dout = (torch.from_numpy(x).to(dtype).transpose(1, 2) for x in arrays)
    causal = cell["causal"]
    if not cell["backward"]:
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=causal)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(q, k, v, is_causal=causal)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
