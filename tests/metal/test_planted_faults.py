"""Faults planted in copies of the project's shaders: each must be reported at its line, for every
kernel that it can be planted in. Deleted barriers are test_barriers.py's.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from shader_cases import KERNELS, Case, compile_kernel, make_tensors, run_kernel
from simulator import SHADERS, Simulator

CASE = Case(head_dim=12, value_dim=9)  # ragged on every side
PRODUCTS = tuple(kernel for kernel in KERNELS if kernel != "delta")  # those that stage tiles
TASK = "params.first_threadgroup + threadgroup_index"
READ_ONLY = {
    "forward": "key",
    "delta": "out",
    "backward_dq": "lse",
    "backward_dv": "dout",
    "backward_dk": "delta",
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
                r"out-of-bounds read of 4 bytes in device memory",
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
    found += [
        Fault(
            "unchecked rows",
            "delta",
            "",
            "if (i >= params.seqlen_q) return;",
            "",
            r"out-of-bounds read of 4 bytes in device memory",
            r"dout?_row\[|out_row\[",
        )
    ]
    for kernel in KERNELS:
        found += [
            Fault(
                "write through const",
                kernel,
                "",
                f"{TASK};",
                f"{TASK}; ((device float*){READ_ONLY[kernel]})[0] = 0.0f;",
                rf"write to read-only buffer '{READ_ONLY[kernel]}'",
                r"\(device float\*\)",
            ),
            # Two threadgroups compute the same rows: right numbers, and no barrier between them.
            Fault(
                "one task twice",
                kernel,
                "",
                TASK,
                f"({TASK}) / 2",
                r"race on device '\w+': write .* no barrier orders threadgroups",
                r"target|lse\[|delta\[",
            ),
        ]
    return found


def test_every_kernel_has_its_faults() -> None:
    assert set(READ_ONLY) == set(KERNELS)


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


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_unchanged_kernel_is_silent(kernel: str, simulator: Simulator) -> None:
    library = compile_kernel(simulator, CASE, kernel)
    assert run_kernel(library, CASE, kernel, make_tensors(CASE)).reports == []
