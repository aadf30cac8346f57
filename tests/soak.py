"""Mixed calls from several threads for some time: every result keeps its bits, and memory stays
flat.

    python tests/soak.py --seconds 600 --threads 8

Forward, backward, decode, packed sequences, a cache with pages, options, merging and errors, of
sizes that change from call to call, with the number of threads changing meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import flashattn as fa
import numpy as np

# After a third of the time all that is kept between calls is there. What may come on top is noise
# of the allocator, which grows with the number of threads.
SPARE_BYTES = 2 << 20
SIZES = (1, 3, 17, 64, 129, 300)


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as text:
        return int(text.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _forward_backward(rows: int, **options: Any) -> list[Any]:
    rng = np.random.default_rng(rows)
    query, key, dout = _normal(rng, 2, rows, 4, 32), _normal(rng, 2, 300, 2, 32), None
    out, lse = fa.attention_forward(query, key, key, backend="cpu", **options)
    dout = np.ones_like(out)
    grads = fa.attention_backward(dout, query, key, key, out, lse, backend="cpu", **options)
    return [out, lse, *(g for g in grads if g is not None)]


def _everything(rows: int) -> list[Any]:
    rng = np.random.default_rng(7)
    return _forward_backward(
        rows,
        mask=_normal(rng, rows, 300),
        sinks=_normal(rng, 4),
        alibi_slopes=_normal(rng, 4),
        softcap=2.0,
        dropout_p=0.25,
        dropout_seed=3,
    )


def _packed(rows: int) -> list[Any]:
    rng = np.random.default_rng(rows)
    query, starts = _normal(rng, 2 * rows, 4, 32), [0, rows // 2, 2 * rows]
    out, lse = fa.attention_varlen(query, query, query, starts, starts, causal=True, backend="cpu")
    return [out, lse]


def _cache(rows: int) -> list[Any]:
    rng = np.random.default_rng(rows)
    pages = [_normal(rng, 40, 16, 2, 32) for _ in range(2)]
    out, lse = fa.attention_kvcache(
        _normal(rng, 2, 1, 4, 32),
        *pages,
        k=_normal(rng, 2, 1, 2, 32),
        v=_normal(rng, 2, 1, 2, 32),
        cache_seqlens=[rows, 5],
        block_table=np.arange(40).reshape(2, 20),
        backend="cpu",
    )
    merged = fa.merge_attention([out, out], [lse, lse])
    return [out, lse, *merged, pages[0]]


def _errors(rows: int) -> list[Any]:
    query = np.ones((1, rows, 2, 8), np.float32)
    for wrong in ({"window": (-5, 0)}, {"mask": query}, {"scale": "x"}, {"backend": "none"}):
        try:
            fa.attention(query, query, query, **wrong)
        except (TypeError, ValueError):
            continue
        raise AssertionError(f"{wrong} was taken")
    return []


CALLS: list[Callable[[int], list[Any]]] = [
    lambda rows: _forward_backward(rows, causal=True),
    _everything,
    _packed,
    _cache,
    _errors,
]


def work(expected: dict[tuple[int, int], list[bytes]], seed: int, end: float) -> int:
    """Calls until `end`; returns how many. Raises where a result has other bits."""
    rng, count = np.random.default_rng(seed), 0
    while time.monotonic() < end:
        kind, rows = int(rng.integers(len(CALLS))), int(rng.choice(SIZES))
        found = [np.asarray(x).tobytes() for x in CALLS[kind](rows)]
        assert found == expected[kind, rows], f"call {kind} of {rows} rows"
        if seed == 0 and count % 20 == 0:
            fa.set_num_threads(int(rng.integers(1, 5)))
        count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=8)
    given = parser.parse_args()
    expected = {
        (kind, rows): [np.asarray(x).tobytes() for x in call(rows)]
        for kind, call in enumerate(CALLS)
        for rows in SIZES
    }
    counts: list[int] = []
    end = time.monotonic() + given.seconds
    workers = [
        threading.Thread(target=lambda n=n: counts.append(work(expected, n, end)), daemon=True)
        for n in range(given.threads)
    ]
    for worker in workers:
        worker.start()
    time.sleep(given.seconds / 3)
    gc.collect()
    before = resident_bytes()
    for worker in workers:
        worker.join()
    gc.collect()
    grown = resident_bytes() - before
    assert len(counts) == given.threads, "a thread ended with an error"
    print(f"{sum(counts)} calls, {grown} bytes more at the end than after a third of the time")
    assert grown < SPARE_BYTES * given.threads


if __name__ == "__main__":
    main()
