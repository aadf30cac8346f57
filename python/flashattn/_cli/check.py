"""Numerics of every backend and instruction set on this machine, against float64: right or wrong.

Each runs in a process of its own, so that an instruction set that the processor refuses is a line
of the report and not the end of it. On a GPU each kind of kernel is run, and each candidate of
`tune`. The exit status is 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
from typing import Any

from flashattn import _core
from flashattn._cli.child import run_child
from flashattn._cli.metal_core import core
from flashattn._cli.progress import progress
from flashattn._machine import backends, config, config_lines

# The reference's products are too small for more: waking threads costs more than they do.
_ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_METAL_KERNELS = ("register", "any", "staged")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to check besides the numbers of every backend and instruction set."""
    parser.add_argument(
        "--candidates",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="every kernel that tune may choose; without the option on a real GPU alone",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """{"right", "ways": [one per backend and instruction set], "config"}."""
    targets: list[dict[str, Any]] = []
    for info in backends():
        if info.available:
            isas = _core.supported_isas() if info.name == "cpu" else [None]
            kernels = _METAL_KERNELS if info.name == "metal" else (None,)
            targets += [
                {"backend": info.name, "isa": isa, "kernels": kind}
                for isa in isas
                for kind in kernels
            ]
            wanted = arguments.candidates
            if info.name == "metal" and (info.default if wanted is None else wanted):
                targets += _candidates()
    ways = [_judge(target) for target in progress(targets, "check")]
    return {
        "right": bool(ways) and all(way["right"] for way in ways),
        "ways": ways,
        "config": config(),
    }


def _candidates() -> list[dict[str, Any]]:
    """A target for each slot of the tuning table."""
    return [
        {"backend": "metal", "isa": None, "slot": slot, "choices": choices}
        for slot, _, choices in core.metal_tuning_slots()
    ]


def _judge(target: dict[str, Any]) -> dict[str, Any]:
    if "slot" in target:
        answer = run_child("flashattn._cli.tune_candidate", target, _ONE_BLAS_THREAD)
        wrong = {"error": answer["error"]} if "error" in answer else answer["wrong"]
        return {**target, **answer, "right": not wrong, "wrong": wrong}
    environment = dict(_ONE_BLAS_THREAD)
    if target["kernels"]:
        environment["FLASHATTN_METAL_KERNELS"] = target["kernels"]
    answer = run_child("flashattn._cli.numerics", target, environment)
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
        "pipelines": answer["pipelines"],
        "device": answer["device"],
    }


def lines(result: dict[str, Any]) -> list[str]:
    """A line for each way, the wrong results, and the facts for a bug report."""
    text = []
    for way in result["ways"]:
        if "slot" in way:
            verdict = "right" if way["right"] else f"WRONG: {way['wrong']}"
            text.append(f"{way['slot']:<28} {len(way['choices'])} candidates {verdict}")
            continue
        name = f"{way['backend']} {way['isa'] or way['kernels'] or ''}".strip()
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
            f"  {kernel}: {most} threads allowed, {threads} needed"
            for kernel, threads, most in way["pipelines"]
            if most < 2 * threads
        ]
        text += [
            f"  {r['dtype']} {r['case']}: {r['result']} error {r['error']} > {r['allowed']:.3g}"
            for r in way["wrong"]
        ]
    return [*text, "", *config_lines(result["config"])]
