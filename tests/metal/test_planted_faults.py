"""Faults planted in copies of the project's shaders: each must be reported at its line, for every
kernel that it can be planted in. Deleted barriers are test_barriers.py's.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from shader_cases import (
    KERNELS,
    OPTION_KERNELS,
    SUM_KERNELS,
    Case,
    compile_kernel,
    make_tensors,
    run_kernel,
)
from shader_options import ShaderOptions
from simulator import SHADERS, Simulator

# Ragged on every side, with every option that has a kernel of its own.
OPTIONS = ShaderOptions(mask="float32", alibi="head", sinks=True)
CASE = Case(head_dim=12, value_dim=9, options=OPTIONS)
ALL = (*KERNELS, *OPTION_KERNELS)
BY_ROW = ("delta", *SUM_KERNELS)  # one simdgroup a row or head, no tiles
PRODUCTS = tuple(kernel for kernel in ALL if kernel not in BY_ROW)
BODY = "[[simdgroup_index_in_threadgroup]]) {"
TASK = "params.first_threadgroup + threadgroup_index"
READ_ONLY = {
    "forward": "key",
    "delta": "out",
    "backward_dq": "lse",
    "backward_dv": "dout",
    "backward_dk": "delta",
    "mask_gradient": "key",
    "slope_gradient": "slope_rows",
    "sink_gradient": "sinks",
}
OUTSIDE = r"out-of-bounds read of 4 bytes in device memory"
# What keeps the last threadgroup inside the arrays, what is reported without it, and where.
RETURNS = {
    "delta": ("if (i >= entry.seqlen_q) return;", OUTSIDE, r"out_row\["),
    "slope_gradient": (
        "if (first >= slopes) return;",
        r"race on device 'dalibi_slopes': write",
        r"dslopes_(batch|head)",
    ),
    "sink_gradient": ("if (h >= params.query_heads) return;", OUTSIDE, r"sinks\["),
}


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in `file` ("" is the kernel's own); the report must say `says` and name a
    line of the changed sources that `line` is found in.
    """

    name: str
    kernel: str
    file: str
    old: str
    new: str
    says: str
    line: str

    def __str__(self) -> str:
        return f"{self.name}-{self.kernel}"


def faults() -> list[Fault]:
    found = []
    for kernel in PRODUCTS:
        found += [
            Fault(
                "unchecked rows",
                kernel,
                "tile.h",
                "if (r < valid_rows && d < dim) {",
                "if (d < dim) {",
                OUTSIDE,
                r"x = to_float\(source\[",
            ),
            Fault(
                "unwritten column",
                kernel,
                "tile.h",
                "tile[r * tile_stride + d] = x;",
                "if (d + 1 < columns) tile[r * tile_stride + d] = x;",
                r"uninitialised read of threadgroup 'arena' \(byte \d+\)",
                r"simdgroup_load\(",
            ),
        ]
    for kernel, (old, says, line) in RETURNS.items():
        found.append(Fault("unchecked rows", kernel, "", old, "", says, line))
    for kernel in ALL:
        found.append(
            Fault(
                "write through const",
                kernel,
                "",
                BODY,
                f"{BODY} ((device float*){READ_ONLY[kernel]})[0] = 0.0f;",
                rf"write to read-only buffer '{READ_ONLY[kernel]}'",
                r"\(device float\*\)",
            )
        )
    # Two threadgroups compute the same rows: right numbers, and no barrier between them. The sums
    # over heads have but one threadgroup here.
    for kernel in ("delta", *PRODUCTS):
        found.append(
            Fault(
                "one task twice",
                kernel,
                "",
                TASK,
                f"({TASK}) / 2",
                r"race on device '\w+': write .* no barrier orders threadgroups",
                r"target|lse\[|delta\[|slope_rows\[|\*at = ",
            )
        )
    return found


def test_every_kernel_has_its_faults() -> None:
    assert set(READ_ONLY) == set(ALL)
    assert set(RETURNS) == set(BY_ROW)


@pytest.mark.parametrize("fault", faults(), ids=str)
def test_a_planted_fault_is_reported_by_line(
    fault: Fault, simulator: Simulator, tmp_path: Path
) -> None:
    for path in SHADERS.iterdir():
        shutil.copy(path, tmp_path)
    target = tmp_path / (fault.file or f"{fault.kernel}.metal")
    text = target.read_text()
    assert text.count(fault.old) == 1, f"{fault.old!r} has to be in {target.name} once"
    target.write_text(text.replace(fault.old, fault.new))

    library = compile_kernel(simulator, CASE, fault.kernel, tmp_path)
    reports = run_kernel(library, CASE, fault.kernel, make_tensors(CASE)).reports
    said = [text for text in reports if re.search(fault.says, text)]
    assert said, reports
    name, number = re.search(r"at ([\w.]+\.(?:metal|h)):(\d+)", said[0]).groups()
    line = (tmp_path / name).read_text().splitlines()[int(number) - 1]
    assert re.search(fault.line, line), f"{said[0]}\n{line}"


@pytest.mark.parametrize("kernel", ALL)
def test_the_unchanged_kernel_is_silent(kernel: str, simulator: Simulator) -> None:
    library = compile_kernel(simulator, CASE, kernel)
    assert run_kernel(library, CASE, kernel, make_tensors(CASE)).reports == []
