"""What a call costs when there is nearly nothing to compute: (1, 1, 1, 8), against the bars.

Best of many short series, in wall and in processor time; the machine's other work only adds. Bars:
5 us from numpy, 8 us from torch without a gradient. Writes results/call_overhead.json.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from typing import Any

import flashattn as fa
import machine
import numpy as np

SERIES, CALLS = 500, 200  # short, so that some series run undisturbed
BARS = {"numpy attention": 5.0, "torch attention, no grad": 8.0}


def microseconds(call: Callable[[], object], timer: Callable[[], float]) -> float:
    call()
    best = min(timeit.repeat(call, timer=timer, number=CALLS, repeat=SERIES))
    return best / CALLS * 1e6


def calls() -> dict[str, Callable[[], object]]:
    q = np.ones((1, 1, 1, 8), np.float32)
    out, lse = fa.attention_forward(q, q, q)
    found: dict[str, Callable[[], object]] = {
        "numpy attention": lambda: fa.attention(q, q, q),
        "numpy attention, causal=True": lambda: fa.attention(q, q, q, causal=True),
        "numpy attention_forward, out=": lambda: fa.attention_forward(q, q, q, out=(out, lse)),
        "numpy attention_backward": lambda: fa.attention_backward(out, q, q, q, out, lse),
    }
    try:
        import ml_dtypes
    except ImportError:
        pass
    else:
        b = q.astype(ml_dtypes.bfloat16)
        found["numpy attention, bfloat16"] = lambda: fa.attention(b, b, b)
    try:
        import torch
        from torch.nn.functional import scaled_dot_product_attention as sdpa
    except ImportError:
        return found
    t = torch.from_numpy(q)
    leaf = t.clone().requires_grad_()
    found |= {
        "torch attention, no grad": lambda: fa.attention(t, t, t),
        "torch attention, recorded": lambda: fa.attention(leaf, t, t),
        "torch's own SDPA, no grad": lambda: sdpa(t, t, t),
        "torch's own SDPA, recorded": lambda: sdpa(leaf, t, t),
    }
    return found


def main() -> None:
    rows: list[dict[str, Any]] = []
    for name, call in calls().items():
        row: dict[str, Any] = {
            "call": name,
            "wall_us": microseconds(call, time.perf_counter),
            "cpu_us": microseconds(call, time.process_time),
            "bar_us": BARS.get(name),
        }
        row["met"] = None if row["bar_us"] is None else row["wall_us"] <= row["bar_us"]
        verdict = {True: "met", False: "MISSED", None: ""}[row["met"]]
        bar = f"bar {row['bar_us']:g} us, {verdict}" if row["bar_us"] else ""
        print(f"{name:<32}{row['wall_us']:8.2f} us wall {row['cpu_us']:8.2f} us cpu  {bar}")
        rows.append(row)
    print("written to", machine.write("call_overhead", {"calls": rows}).name)


if __name__ == "__main__":
    main()
