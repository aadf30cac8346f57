"""Measures which kernels this machine's GPU is fastest with, and keeps the answer for later calls.

Each candidate runs in a process of its own, is compared with float64 first and only then timed, by
the GPU's own clock. A candidate that is wrong, crashes or hangs is left out. The table is stored
for this GPU, operating system and version; with --json it can be sent in.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from flashattn._cli.child import run_child
from flashattn._cli.metal_core import core
from flashattn._cli.progress import progress
from flashattn._machine import backends, config

if TYPE_CHECKING:
    import argparse

# What a candidate has to gain on the shipped choice, so that noise changes nothing.
_LEAST_GAIN = 0.02
_CHILD_SECONDS = 60.0  # after which a candidate counts as one that hangs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured, for how long, and whether it is kept."""
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for the whole")
    parser.add_argument("--rounds", type=int, default=7, help="timed calls of each candidate")
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--only", action="append", metavar="TEXT", help="slots whose name has it")
    parser.add_argument("--dry-run", action="store_true", help="store nothing")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """{"right", "slots": [{"slot", "shipped", "chosen", "candidates"}], "table", "stored", ...}.

    `right` is False where there is no GPU, a candidate was wrong, or the table was not stored.
    """
    if not any(info.name == "metal" and info.available for info in backends()):
        return {"right": False, "error": "this machine has no usable Metal device", "slots": []}
    slots = [s for s in core.metal_tuning_slots() if _wanted(s[0], arguments.only)]
    ends = time.monotonic() + arguments.seconds
    measured = [
        _measure_slot(slot, names, arguments, ends) for slot, _, names in progress(slots, "tune")
    ]
    rows = [f"{m['slot']} {m['chosen']}" for m in measured if m["chosen"] is not None]
    rows += _kept({m["slot"] for m in measured if m["chosen"] is not None})
    table = "\n".join(["flashattn tuning 1", *rows, "end", ""])
    result: dict[str, Any] = {
        "slots": measured,
        "table": table,
        "stored": None,
        "config": config(),
    }
    result["right"] = any(m["chosen"] for m in measured) and not any(m["broken"] for m in measured)
    if rows and not arguments.dry_run:
        try:
            result["stored"] = core.metal_save_tuning(table)
            core.metal_use_tuning(table)
        except RuntimeError as failure:
            result |= {"right": False, "error": str(failure)}
    return result


def _wanted(slot: str, parts: list[str] | None) -> bool:
    return not parts or any(part in slot for part in parts)


def _kept(measured: set[str]) -> list[str]:
    """Rows of the table in force for slots that this run did not measure."""
    return [
        f"{slot} {chosen}"
        for slot, chosen, names in core.metal_tuning_slots()
        if slot not in measured and chosen != names[0]
    ]


def _measure_slot(
    slot: str, names: list[str], arguments: argparse.Namespace, ends: float
) -> dict[str, Any]:
    """Every candidate's time or what is wrong with it; `chosen` is None where time ran out."""
    times: dict[str, float] = {}
    broken: dict[str, str] = {}
    for name in names:
        if time.monotonic() > ends:
            break
        request = {
            "slot": slot,
            "choice": name,
            "rounds": arguments.rounds,
            "shape": [1, arguments.seqlen, arguments.heads],
        }
        answer = run_child("flashattn._cli.tune_candidate", request, seconds=_CHILD_SECONDS)
        if "seconds" in answer:
            times[name] = statistics.median(answer["seconds"])
        else:
            broken[name] = answer["error"]
    shipped = names[0]
    chosen = None
    if times and (len(times) + len(broken) == len(names)):
        chosen = min(times, key=lambda name: times[name])
        if shipped in times and times[chosen] > (1 - _LEAST_GAIN) * times[shipped]:
            chosen = shipped
    return {
        "slot": slot,
        "shipped": shipped,
        "chosen": chosen,
        "candidates": times,
        "broken": broken,
    }


def lines(result: dict[str, Any]) -> list[str]:
    """A line for each slot, what went wrong, and where the table is."""
    text = []
    for slot in result["slots"]:
        times, shipped, chosen = slot["candidates"], slot["shipped"], slot["chosen"]
        name = f"{slot['slot']:<28}"
        if chosen is None:
            text.append(f"{name} not measured: the time was up")
        else:
            gain = f"{times[shipped] / times[chosen]:.2f}x" if shipped in times else "-"
            text.append(
                f"{name} {chosen:<10} {times[chosen] * 1e3:9.3f} ms  {gain} of {shipped}"
                f"  ({len(times)} candidates)"
            )
        text += [f"  left out: {which}: {why}" for which, why in slot["broken"].items()]
    if "error" in result:
        text.append(result["error"])
    elif result["stored"]:
        text.append(f"stored in {result['stored']}")
    return text
