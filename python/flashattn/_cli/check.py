"""Numerics of every backend and instruction set on this machine, against float64: right or wrong.

Each runs in a process of its own, so that an instruction set that the processor refuses is a line
of the report and not the end of it. The exit status is 1 when anything is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashattn import _core
from flashattn._cli.child import run_child
from flashattn._cli.progress import progress
from flashattn._machine import backends, config, config_lines

if TYPE_CHECKING:
    import argparse

# The reference's products are too small for more: waking threads costs more than they do.
_ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments of its own."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """{"right", "ways": [one per backend and instruction set], "config"}."""
    targets: list[dict[str, Any]] = []
    for info in backends():
        if info.available:
            isas = _core.supported_isas() if info.name == "cpu" else [None]
            targets += [{"backend": info.name, "isa": isa} for isa in isas]
    ways = [_judge(target) for target in progress(targets, "check")]
    return {
        "right": bool(ways) and all(way["right"] for way in ways),
        "ways": ways,
        "config": config(),
    }


def _judge(target: dict[str, Any]) -> dict[str, Any]:
    answer = run_child("flashattn._cli.numerics", target, _ONE_BLAS_THREAD)
    if "error" in answer:
        return {**target, "right": False, "error": answer["error"], "checked": 0, "wrong": []}
    records = answer["records"]
    wrong = [r for r in records if r["error"] is None or r["error"] > r["allowed"]]
    shares = [r["error"] / r["allowed"] for r in records if r["error"] and r["allowed"]]
    return {
        **target,
        "right": bool(records) and not wrong,
        "checked": len(records),
        "worst_share": max(shares, default=0.0),
        "wrong": wrong,
        "skipped": answer["skipped"],
    }


def lines(result: dict[str, Any]) -> list[str]:
    """A line for each way, the wrong results, and the facts for a bug report."""
    text = []
    for way in result["ways"]:
        name = f"{way['backend']} {way['isa'] or ''}".strip()
        if "error" in way:
            text.append(f"{name:<20} WRONG: did not finish: {way['error']}")
            continue
        verdict = "right" if way["right"] else "WRONG"
        text.append(
            f"{name:<20} {verdict}: {way['checked']} results, largest error "
            f"{way['worst_share']:.0%} of what is allowed"
        )
        text += [f"  not checked: {reason}" for reason in way["skipped"]]
        text += [
            f"  {r['dtype']} {r['case']}: {r['result']} error {r['error']} > {r['allowed']:.3g}"
            for r in way["wrong"]
        ]
    return [*text, "", *config_lines(result["config"])]
