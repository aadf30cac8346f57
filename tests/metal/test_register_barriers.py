"""Every barrier of the register kernels is deleted in turn, as in test_barriers.py, and the checker
must report the race in one run with the plain fifo schedule.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from register_cases import (
    REGISTER_KERNELS,
    Register,
    fitting,
    is_register_file,
    probe_launch,
    run_register,
)
from shader_cases import SLOTS, Case, compile_launch, make_tensors
from shader_options import ShaderOptions
from simulator import SHADERS, Simulator
from test_barriers import BARRIER, RACE, Site

# Several blocks on both sides, ragged ends, two heads per key head; the paths for values that are
# not finite; the sums that ALiBi's slopes ask for.
CASES = [
    Case(head_dim=12, value_dim=9),
    Case(head_dim=12, value_dim=9, non_finite="key"),
    Case(head_dim=12, value_dim=9, non_finite="query"),
    Case(head_dim=12, value_dim=9, options=ShaderOptions(alibi="head")),
]


def sites() -> list[Site]:
    found = []
    for path in sorted(SHADERS.iterdir()):
        text = path.read_text()
        for number, match in enumerate(BARRIER.finditer(text), 1):
            if is_register_file(path):
                found.append(Site(path.name, number, text.count("\n", 0, match.start()) + 1))
    return found


def registers() -> list[Register]:
    """Float and half factors of every kernel: the lane map is learned in another way."""
    return [
        fitting(kernel, replace(CASES[0], dtype=dtype))
        for kernel in REGISTER_KERNELS
        for dtype in ("float32", "float16")
    ]


def probe_reports(simulator: Simulator, folder: Path) -> list[str]:
    """Of the kernel that tells the host its lane map."""
    launch = probe_launch()
    kernel = compile_launch(simulator, launch, folder).kernel(launch.kernel, {})
    positions = np.zeros(64, np.uint32)
    buffers = [positions if name == "out" else None for name in SLOTS]
    run = kernel((1, 1, 1), (launch.threads, 1, 1), buffers)
    assert run.reports or sorted(positions) == list(range(64))
    return run.reports


def reports(simulator: Simulator, folder: Path, stem: str = "") -> list[str]:
    """Of the first kernel and case that has any; `stem` picks one shader."""
    if stem in ("", "lane_map_probe") and (found := probe_reports(simulator, folder)):
        return found
    for register in registers():
        launch = register.launch()
        if stem not in ("", launch.shader):
            continue
        library = compile_launch(simulator, launch, folder)
        for case in CASES:
            case = replace(case, dtype=register.dtype)
            for run in run_register(library, register, case, make_tensors(case)):
                if run.reports:
                    return run.reports
    return []


def test_unchanged_shaders_are_silent(simulator: Simulator) -> None:
    for schedule in ("fifo", "lifo", "random", "priority"):
        simulator.set(schedule=schedule, map="random:7")
        assert reports(simulator, SHADERS) == []


@pytest.mark.parametrize("site", sites(), ids=str)
def test_a_deleted_barrier_is_reported(site: Site, simulator: Simulator, tmp_path: Path) -> None:
    for path in SHADERS.iterdir():
        shutil.copy(path, tmp_path)
    target = tmp_path / site.file
    counter = iter(range(1, 10**6))
    target.write_text(
        BARRIER.sub(
            lambda m: ";" if next(counter) == site.number else m.group(), target.read_text()
        )
    )
    stem = Path(site.file).stem if site.file.endswith(".metal") else ""
    found = reports(simulator, tmp_path, stem)
    assert found, f"deleting the barrier at {site.file}:{site.line} went unnoticed"
    assert any(re.search(RACE, text) for text in found), found
