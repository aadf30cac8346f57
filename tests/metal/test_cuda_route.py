"""The CUDA route still translates every shader and still knows where to plant its faults. Running
it needs a GPU (tests/metal/cuda/run.sh) and is no part of the tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from register_cases import REGISTER_KERNELS
from shader_cases import KERNELS, SUM_KERNELS
from simulator import METAL

ATTRIBUTE = re.compile(r"\[\[")
QUALIFIER = re.compile(r"\b(device|threadgroup|thread|constant|kernel)\b")


def test_all_units_are_written(tmp_path: Path) -> None:
    command = [sys.executable, str(METAL / "cuda" / "plan.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    units = {path.stem: path.read_text() for path in tmp_path.glob("*.cu")}
    faults = (tmp_path / "faults.txt").read_text().split()
    assert {f"base_{kernel}" for kernel in (*KERNELS, *SUM_KERNELS)} < set(units)
    with_options = [kernel for kernel in KERNELS if kernel != "delta"] + ["mask_gradient"]
    assert {f"options_{kernel}" for kernel in with_options} < set(units)
    assert {f"base_register_{kernel}" for kernel in REGISTER_KERNELS} < set(units)
    long_units = ("full_register_forward_64", "dropout_register_backward_dk_128")
    assert {*long_units, "dropout_forward_0"} < set(units)
    assert {"base_split", "base_merge_chunks", "nobar_register_dq_2", "nobar_exchange_1"} < set(
        units
    )
    assert set(faults) < set(units)
    assert len([name for name in faults if name.startswith("nobar_")]) >= 30
    for name, text in units.items():
        code = re.sub(r'#line [^\n]*|"[^"]*"', "", text)
        assert not ATTRIBUTE.search(code), name
        assert not QUALIFIER.search(code), name
        assert "__global__" in code, name
        assert "__device__ __forceinline__" in code, name


def test_a_planted_fault_changes_its_unit_alone(tmp_path: Path) -> None:
    command = [sys.executable, str(METAL / "cuda" / "plan.py"), str(tmp_path)]
    subprocess.run(command, capture_output=True, check=True)
    base = (tmp_path / "base_forward.cu").read_text().count("barrier(mem_flags")
    for number in range(1, 7):
        text = (tmp_path / f"nobar_forward_{number}.cu").read_text()
        assert text.count("barrier(mem_flags") == base - 1
