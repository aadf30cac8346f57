"""Every barrier of every shader is deleted in turn: the checker must report the race, by file and
line, in one run with the plain fifo schedule. A barrier that no case needs is listed here with the
reason, and must stay silent.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from shader_cases import KERNELS, Case, check_abi, compile_kernel, make_tensors, run_kernel
from simulator import SHADERS, Simulator

BARRIER = re.compile(r"\b(threadgroup|simdgroup)_barrier\([^;]*\);")

# Several blocks on both sides, ragged ends, two heads per key head; then the paths for values that
# are not finite.
CASES = [
    Case(head_dim=12, value_dim=9),
    Case(head_dim=12, value_dim=9, non_finite="value"),
    Case(head_dim=12, value_dim=9, non_finite="query"),
]

# (file, number of the barrier in the file counted from 1): why deleting it is no defect.
REDUNDANT: dict[tuple[str, int], str] = {}


@dataclass(frozen=True)
class Site:
    file: str
    number: int
    line: int

    def __str__(self) -> str:
        return f"{self.file}-{self.number}"


def sites() -> list[Site]:
    found = []
    for path in sorted([*SHADERS.glob("*.metal"), *SHADERS.glob("*.h")]):
        text = path.read_text()
        for number, match in enumerate(BARRIER.finditer(text), 1):
            found.append(Site(path.name, number, text.count("\n", 0, match.start()) + 1))
    return found


def reports(simulator: Simulator, folder: Path, kernels: list[str]) -> list[str]:
    """Reports of the kernels over the cases, up to the first kernel that has any."""
    for kernel in kernels:
        library = compile_kernel(simulator, CASES[0], kernel, folder)
        for case in CASES:
            run = run_kernel(library, case, kernel, make_tensors(case))
            if run.reports:
                return run.reports
    return []


def test_the_slots_are_those_of_the_shaders() -> None:
    check_abi()


def test_unchanged_shaders_are_silent(simulator: Simulator) -> None:
    for schedule in ("fifo", "lifo", "random", "priority"):
        simulator.set(schedule=schedule, map="random:7")
        assert reports(simulator, SHADERS, list(KERNELS)) == []


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
    kernels = [Path(site.file).stem] if site.file.endswith(".metal") else list(KERNELS)
    found = reports(simulator, tmp_path, kernels)
    if (site.file, site.number) in REDUNDANT:
        assert found == [], "this barrier is needed: take it off the list of redundant ones"
        return
    assert found, f"deleting the barrier at {site.file}:{site.line} went unnoticed"
    assert any(
        re.search(r"race on threadgroup '\w+': \w+ at \w+\.(metal|h):\d+", text) for text in found
    )


def test_the_list_of_redundant_barriers_names_existing_ones() -> None:
    known = {(site.file, site.number) for site in sites()}
    assert set(REDUNDANT) <= known
