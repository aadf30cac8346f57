"""Packed sequences against a padded batch, and decode through a block table against a plain cache.

Every side runs in a process of its own on one thread, and the sides take turns; what counts is the
best processor time of each. Writes results/packed_and_paged.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import flashattn as fa
import machine
import numpy as np

ROUNDS = 5  # processes of each side, in turns
SECONDS = 1.0  # that one process measures for
SEQUENCES, LENGTH = 64, 128
CACHE_ROWS, ENTRIES = 4096, 8
PAGE_SIZES = (16, 64, 256)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def padded() -> Callable[[], object]:
    q, k, v = (normal(SEQUENCES, LENGTH, 8, 64) for _ in range(3))
    return lambda: fa.attention(q, k, v, causal=True)


def packed() -> Callable[[], object]:
    q, k, v = (normal(SEQUENCES * LENGTH, 8, 64) for _ in range(3))
    cu = np.arange(SEQUENCES + 1, dtype=np.int32) * LENGTH
    return lambda: fa.attention_varlen(q, k, v, cu, cu, causal=True)


def padded_backward() -> Callable[[], object]:
    q, k, v = (normal(SEQUENCES, LENGTH, 8, 64) for _ in range(3))
    out, lse = fa.attention_forward(q, k, v, causal=True)
    return lambda: fa.attention_backward(out, q, k, v, out, lse, causal=True)


def packed_backward() -> Callable[[], object]:
    q, k, v = (normal(SEQUENCES * LENGTH, 8, 64) for _ in range(3))
    cu = np.arange(SEQUENCES + 1, dtype=np.int32) * LENGTH
    out, lse = fa.attention_varlen(q, k, v, cu, cu, causal=True)
    return lambda: fa.attention_varlen_backward(out, q, k, v, out, lse, cu, cu, causal=True)


def cache(page_size: int) -> Callable[[], object]:
    """One query row per entry over a full cache; page_size 0 is a plain one."""
    q, k, v = normal(ENTRIES, 1, 8, 64), *(normal(ENTRIES, CACHE_ROWS, 8, 64) for _ in range(2))
    if page_size == 0:
        return lambda: fa.attention_kvcache(q, k, v, cache_seqlens=CACHE_ROWS)
    pages = [x.reshape(-1, page_size, 8, 64) for x in (k, v)]
    count = pages[0].shape[0]
    table = np.random.default_rng(1).permutation(count).astype(np.int32).reshape(ENTRIES, -1)
    return lambda: fa.attention_kvcache(q, *pages, cache_seqlens=CACHE_ROWS, block_table=table)


SIDES: dict[str, Callable[[], Callable[[], object]]] = {
    "padded": padded,
    "packed": packed,
    "padded backward": padded_backward,
    "packed backward": packed_backward,
    "plain cache": lambda: cache(0),
    **{f"pages of {size}": lambda size=size: cache(size) for size in PAGE_SIZES},
}
COMPARISONS = [
    ("packed", "padded"),
    ("packed backward", "padded backward"),
    *((f"pages of {size}", "plain cache") for size in PAGE_SIZES),
]


def best_milliseconds(side: str) -> float:
    fa.set_num_threads(1)
    call = SIDES[side]()
    call()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best * 1e3


def main() -> None:
    if len(sys.argv) == 2:
        print(json.dumps(best_milliseconds(sys.argv[1])))
        return
    best = dict.fromkeys(SIDES, float("inf"))
    for _ in range(ROUNDS):
        for side in SIDES:
            command = [sys.executable, __file__, side]
            found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            best[side] = min(best[side], json.loads(found))
    rows: list[dict[str, Any]] = []
    for side, against in COMPARISONS:
        ratio = best[side] / best[against]
        rows.append({"side": side, "against": against, "ratio": ratio})
        print(f"{side:<18}{best[side]:8.2f} ms  {against:<18}{best[against]:8.2f} ms  {ratio:.3f}")
    print("written to", machine.write("packed_and_paged", {"ms": best, "ratios": rows}).name)


if __name__ == "__main__":
    main()
