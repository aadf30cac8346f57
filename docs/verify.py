"""Measures again what the documents claim, and prints claimed against measured.

    python docs/verify.py                 # everything, some minutes
    python docs/verify.py memory errors   # what these names pick

A claim names its document and finds its figure there, so that a figure that changes, or goes, is
noticed (tests/test_docs.py looks for all of them). Exit status 1 when a claim does not hold; KINDS
says how much one may be off. Figures that only other machines can give (a GPU, a Mac) stand in
`ELSEWHERE`.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = str(ROOT / "benchmarks")
# Kind of claim: what its figure times this is in the units measured, and how much more is allowed.
# Times belong to a machine and its other work, ratios and resident memory to that a little too.
KINDS = {
    "errors": (1.0, 1.0),
    "memory": (1e6, 1.1),
    "times": (1.0, 1.5),
    "ratios": (1.0, 1.1),
    "training": (1.0, 1.0),
    "work": (1.0, 1.0),
}

ELSEWHERE = (
    "docs/verification.md: runs of the shaders on an NVIDIA GPU (tests/metal/cuda/run.sh)",
    "docs/metal-performance.md: predictions for an Apple GPU (tests/metal/cost_model)",
    "benchmarks/results: rates against peers (benchmarks/run.py on a quiet machine)",
)


@dataclass(frozen=True)
class Claim:
    """A figure of a document and how to get it again.

    The pattern's one group is the figure, in the unit of the kind.
    """

    kind: str
    document: str
    pattern: str
    measure: Callable[[], float]

    @property
    def unit(self) -> float:
        """What the document's figure is a multiple of."""
        return KINDS[self.kind][0]

    def claimed(self) -> float:
        """The figure in the document."""
        found = re.search(self.pattern, " ".join((ROOT / self.document).read_text().split()))
        if found is None:
            raise ValueError(f"{self.document} does not say {self.pattern!r}")
        return float(found[1]) * self.unit

    def holds(self, measured: float) -> bool:
        """At most what is claimed, rounded as it is written there, times the slack."""
        claimed = self.claimed()
        return measured <= claimed * KINDS[self.kind][1] or math.isclose(
            measured, claimed, rel_tol=0.05
        )


def run(*command: str) -> str:
    """What a Python program prints, in a folder where it may leave its pictures."""
    with tempfile.TemporaryDirectory() as folder:
        finished = subprocess.run(
            [sys.executable, *command], cwd=folder, check=True, capture_output=True, text=True
        )
    return finished.stdout


@cache
def demo() -> dict[str, Any]:
    """The demo's result."""
    result: dict[str, Any] = json.loads(run("-m", "flashattn", "demo", "--json"))
    return result


def largest_gradient_error() -> float:
    """Of dq, dk and dv in the demo."""
    return max(float(demo()["errors"][name]["max"]) for name in ("dq", "dk", "dv"))


def demo_bytes(way: str) -> float:
    """Peak memory of the demo's problem above inputs and outputs."""
    return float(demo()["memory"][way]["extra_bytes"])


def peak_bytes(head_dim: int) -> float:
    """Forward and backward at 16384 tokens of 8 heads."""
    from flashattn._cli.child import run_child

    request = {"way": "flashattn", "shape": (1, 16384, 8, head_dim), "causal": True}
    return float(run_child("flashattn._cli.memory", {**request, "passes": "both"})["extra_bytes"])


@cache
def overhead() -> dict[str, float]:
    """Microseconds of a tiny call, by name."""
    code = "import call_overhead as c, json, time; print(json.dumps({n: c.microseconds(f, "
    code += "time.perf_counter) for n, f in c.calls().items() if 'own' not in n}))"
    text = run("-c", f"import sys; sys.path.insert(0, {BENCHMARKS!r}); {code}")
    result: dict[str, float] = json.loads(text)
    return result


@cache
def packed_ratios() -> dict[str, float]:
    """Times of packed sequences and pages against their plain counterparts."""
    code = f"import sys; sys.path.insert(0, {BENCHMARKS!r}); import json, packed_and_paged as p; "
    code += "print(json.dumps(p.best_milliseconds(sys.argv[1])))"
    sides = ("padded", "packed", "plain cache", "pages of 16", "pages of 64", "pages of 256")
    best = dict.fromkeys(sides, math.inf)
    for _ in range(3):
        for side in sides:
            best[side] = min(best[side], float(run("-c", code, side)))
    pages = {name: best[name] / best["plain cache"] for name in sides[3:]}
    return {**pages, "packed": best["packed"] / best["padded"]}


def wide_pages() -> float:
    """Pages of 64 and 256 rows against a contiguous cache."""
    return max(packed_ratios()["pages of 64"], packed_ratios()["pages of 256"])


@cache
def operator_microseconds() -> float:
    """A small call through torch's dispatcher."""
    code = (
        "import timeit, torch, flashattn as fa\n"
        "from flashattn import _torch_ops\n"
        "q = torch.ones(1, 1, 1, 8)\n"
        "call = lambda: _torch_ops.dispatch('attention', q, q, q, {})\n"
        "print(min(timeit.repeat(call, number=200, repeat=100)) / 200 * 1e6)\n"
    )
    return float(run("-c", code))


@cache
def training_distance() -> float:
    """The largest distance of the example's loss curve from torch's."""
    text = run(str(ROOT / "examples" / "train_char.py"))
    found = re.search(r"largest distance from torch's loss: ([\d.e+-]+);", text)
    assert found is not None
    return float(found[1])


def most_work(ranks: int, sharding: Any) -> float:
    """Visible scores of the rank that has most, of 8192 causal rows."""
    from flashattn import _shards

    shards = _shards.lengths(8192, ranks, sharding)
    held = _shards.pieces(shards, sharding)
    return max(sum(sum(range(p.start + 1, p.stop + 1)) for p in own) for own in held)


TORCH_CALL = "torch attention, no grad"
CHANGELOG, README = "CHANGELOG.md", "README.md"
FIGURE = r"([\d.]+(?:e-?\d+)?)"
SMALL_CALLS = "docs/decisions/0009-torch-adapter.md"
CLAIMS = [
    Claim("errors", README, f"error of out {FIGURE}", lambda: demo()["errors"]["out"]["max"]),
    Claim("errors", README, f"of the gradients {FIGURE}", largest_gradient_error),
    Claim("memory", README, f"{FIGURE} MB above inputs and", lambda: demo_bytes("flashattn")),
    Claim("memory", README, f"way takes {FIGURE} MB", lambda: demo_bytes("naive")),
    Claim("memory", CHANGELOG, rf"is {FIGURE} MB \(head", lambda: peak_bytes(64)),
    Claim("memory", CHANGELOG, rf"and {FIGURE} MB \(128\)", lambda: peak_bytes(128)),
    Claim("times", CHANGELOG, f"{FIGURE} us from numpy", lambda: overhead()["numpy attention"]),
    Claim("times", CHANGELOG, f"{FIGURE} us from torch", lambda: overhead()[TORCH_CALL]),
    Claim("times", SMALL_CALLS, f"costs {FIGURE} us per small call", operator_microseconds),
    Claim("ratios", CHANGELOG, f"256 rows takes {FIGURE} times", wide_pages),
    Claim("ratios", CHANGELOG, f"16 rows {FIGURE} times", lambda: packed_ratios()["pages of 16"]),
    Claim("training", README, f"largest distance {FIGURE}", training_distance),
    *(
        Claim("work", "docs/distributed.md", pattern, lambda n=n, s=s: most_work(n, s))  # type: ignore[misc]
        for n in (1, 2, 4, 8, 16, 32, 64)
        for s, pattern in (
            ("contiguous", rf"\| {n} \| \d+ \| {FIGURE} \("),
            ("zigzag", rf"\| {n} \| \d+ \| [^|]* \| {FIGURE} \|"),
        )
    ),
]


def main() -> None:
    """Prints a line for each claim."""
    kinds = set(sys.argv[1:]) or {claim.kind for claim in CLAIMS}
    broken = 0
    for claim in (claim for claim in CLAIMS if claim.kind in kinds):
        measured = claim.measure() / claim.unit
        claimed = claim.claimed() / claim.unit
        holds = claim.holds(measured * claim.unit)
        broken += not holds
        name = f"{claim.document}: {claim.pattern.replace(FIGURE, '…')}"
        verdict = "" if holds else "  DOES NOT HOLD"
        print(f"{name:<70} claimed {claimed:<10.4g} measured {measured:.4g}{verdict}", flush=True)
    print("\nnot measured here:", *ELSEWHERE, sep="\n  ")
    sys.exit(broken != 0)


if __name__ == "__main__":
    main()
