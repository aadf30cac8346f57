"""`record.py`: measures every kernel of costed.py and decode.py, writes counts.json and
decode_counts.json beside it and the tables of docs/metal-performance.md. test_cost_model.py holds
later kernels against the numbers.

The registers need NVIDIA's ptxas on the path.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from costed import Costed, costed_kernels
from decode import decode_kernels, decode_table, measure_decode, split_launch
from measure import Measured, measure, translated
from model import FITS, slots, slow_share
from registers import registers
from simulator import Simulator

HERE = Path(__file__).resolve().parent

COUNTS = HERE / "counts.json"
PAGE = HERE.parent.parent.parent / "docs" / "metal-performance.md"
DECODE_COUNTS = HERE / "decode_counts.json"
LENGTH = 4096  # keys over which new maxima are averaged


def predicted(costed: Costed, measured: Measured, used: int) -> list[float]:
    """Slots per score element under each fit of the model."""

    def time(counts: dict[str, float]) -> list[float]:
        size = measured.threadgroup_bytes
        return [slots(counts, measured.shape, used, size, fit) for fit in FITS.values()]

    steady = time(measured.counts)
    if measured.moving is None:
        return steady
    shape = measured.shape
    rows = shape.block_rows // shape.simdgroups
    share = slow_share(rows, shape.block_columns, LENGTH, costed.slack)
    moving = time(measured.moving)
    return [a + share * (b - a) for a, b in zip(steady, moving, strict=True)]


def row(costed: Costed, measured: Measured, used: int) -> dict[str, Any]:
    shape = measured.shape
    elements = shape.block_rows * shape.block_columns
    times = predicted(costed, measured, used)
    per_element = {
        name: round(value / elements, 4) for name, value in measured.counts.items() if value
    }
    per_element.pop("fiber_switches", None)
    return {
        "tile": f"{shape.block_rows}x{shape.block_columns}, {shape.simdgroups} simdgroups",
        "registers": used,
        "threadgroup_bytes": measured.threadgroup_bytes,
        "barriers_per_tile": round(measured.counts["threadgroup_barriers"], 3),
        "slots": [round(min(times), 2), round(max(times), 2)],
        "percent_of_peak": [
            round(100 * shape.useful / time, 1) for time in (max(times), min(times))
        ],
        "per_element": per_element,
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| kernel | tile | registers | threadgroup bytes | slots | % of ALU peak |",
        "|---|---|---|---|---|---|",
    ]
    for name, r in rows.items():
        times, peak = ("-".join(f"{x:.0f}" for x in r[k]) for k in ("slots", "percent_of_peak"))
        lines.append(
            f"| {name} | {r['tile']} | {r['registers']} | {r['threadgroup_bytes']} "
            f"| {times} | {peak} |"
        )
    return "\n".join(lines)


def main() -> None:
    simulator = Simulator()
    rows = {}
    for costed in costed_kernels():
        measured = measure(simulator, costed.name, costed.launch, costed.head_dim, costed.dtype)
        rows[costed.name] = row(costed, measured, registers(translated(costed.launch)))
        print(costed.name, rows[costed.name]["slots"], rows[costed.name]["registers"], flush=True)
    COUNTS.write_text(json.dumps(rows, indent=1) + "\n")
    put_on_page("table", table(rows))
    record_decode(simulator)


def record_decode(simulator: Simulator) -> None:
    rows = {}
    for costed in decode_kernels():
        used = registers(translated(split_launch(costed)))
        rows[costed.name] = measure_decode(simulator, costed, used)
        print(costed.name, rows[costed.name]["cycles"], used, flush=True)
    DECODE_COUNTS.write_text(json.dumps(rows, indent=1) + "\n")
    put_on_page("decode", decode_table(rows))


def put_on_page(name: str, text: str) -> None:
    """Between the page's marks of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = PAGE.read_text().partition(begin)
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    main()
