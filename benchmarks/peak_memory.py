"""Peak memory above inputs and outputs, forward and backward, as the sequence grows.

Each figure is the resident high-water mark of a process of its own. The bar is 100 MB at T = 16384,
where the scores of one head alone take 1 GB. Writes results/peak_memory.json.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import machine
from flashattn._cli.child import run_child

BAR_SEQLEN, BAR_BYTES = 16384, 100e6
NAIVE_LIMIT = 4096  # the O(T^2) way is only measured up to here
RUNS = [
    ("flashattn", "forward"),
    ("flashattn", "backward"),
    ("flashattn", "both"),
    ("naive", "forward"),
    ("naive", "both"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seqlen, head_dim in itertools.product(arguments.seqlens, arguments.head_dims):
        for way, passes in RUNS:
            if way == "naive" and seqlen > NAIVE_LIMIT:
                continue
            shape = (1, seqlen, arguments.heads, head_dim)
            request = {"way": way, "shape": shape, "causal": True, "passes": passes}
            answer = run_child("flashattn._cli.memory", request)
            row = {**request, **answer, "bar_bytes": None, "met": None}
            if way == "flashattn" and seqlen == BAR_SEQLEN and "extra_bytes" in answer:
                row |= {"bar_bytes": BAR_BYTES, "met": answer["extra_bytes"] <= BAR_BYTES}
            rows.append(row)
            amount = f"{answer.get('extra_bytes', float('nan')) / 1e6:10.1f} MB"
            verdict = {True: "  met", False: "  MISSED", None: ""}[row["met"]]
            print(f"T {seqlen:<7}D {head_dim:<5}{passes:<10}{way:<11}{amount}{verdict}", flush=True)
    print("written to", machine.write("peak_memory", {"rows": rows}).name)


if __name__ == "__main__":
    main()
