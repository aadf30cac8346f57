"""Every barrier of every shader is deleted in turn: the checker must report the race, by file and
line, in one run with the plain fifo schedule, for both block geometries and for causal problems,
problems without a mask and problems with every option alike. A barrier that no case needs is listed
here with the reason, and must stay silent.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from register_cases import is_register_file
from shader_cases import (
    KERNELS,
    OPTION_KERNELS,
    Case,
    check_abi,
    compile_kernel,
    make_tensors,
    run_kernel,
)
from shader_options import ShaderOptions
from simulator import SHADERS, Library, Simulator

RACE = r"race on threadgroup '\w+': \w+ at \w+\.(metal|h):\d+"
BARRIER = re.compile(r"\b(threadgroup|simdgroup)_barrier\([^;]*\);")

# Several blocks on both sides, ragged ends, two heads per key head; then the paths for values that
# are not finite.
CAUSAL = [
    Case(head_dim=12, value_dim=9, non_finite=non_finite) for non_finite in ("", "value", "query")
]
# A mask that all rows share: one tile of it is added to several tiles of scores.
OPTIONS = ShaderOptions(
    mask="float32", mask_axes="hk", softcap=2.0, alibi="head", sinks=True, dropout_p=0.25
)
GROUPS = {
    "causal": CAUSAL,
    "all keys": [replace(case, causal=False) for case in CAUSAL],
    "options": [replace(case, causal=False, options=OPTIONS) for case in CAUSAL],
}
# The second has the smaller blocks of head dimensions past 128.
HEAD_DIMS = (12, 136)
ALL_KERNELS = (*KERNELS, *OPTION_KERNELS)

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
        if is_register_file(path):  # test_register_barriers.py
            continue
        text = path.read_text()
        for number, match in enumerate(BARRIER.finditer(text), 1):
            found.append(Site(path.name, number, text.count("\n", 0, match.start()) + 1))
    return found


def reports(kernel: str, library: Library, cases: list[Case]) -> list[str]:
    """Those of the first case that has any."""
    for case in cases:
        if kernel in case.kernels:
            found = run_kernel(library, case, kernel, make_tensors(case)).reports
            if found:
                return found
    return []


def applies(kernels: list[str], cases: list[Case]) -> bool:
    """Whether a case has work for one of the kernels."""
    return any(kernel in case.kernels for kernel in kernels for case in cases)


def groups_of(head_dim: int) -> dict[str, list[Case]]:
    return {
        name: [replace(case, head_dim=head_dim) for case in cases] for name, cases in GROUPS.items()
    }


def test_the_slots_are_those_of_the_shaders() -> None:
    check_abi()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_unchanged_shaders_are_silent(kernel: str, head_dim: int, simulator: Simulator) -> None:
    groups = groups_of(head_dim)
    library = compile_kernel(simulator, groups["causal"][0], kernel)
    for schedule in ("fifo", "lifo", "random", "priority"):
        simulator.set(schedule=schedule, map="random:7")
        for cases in groups.values():
            assert reports(kernel, library, cases) == []


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("site", sites(), ids=str)
def test_a_deleted_barrier_is_reported(
    site: Site, head_dim: int, simulator: Simulator, tmp_path: Path
) -> None:
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
    missed = {name: cases for name, cases in groups_of(head_dim).items() if applies(kernels, cases)}
    for kernel in kernels:
        library = compile_kernel(simulator, groups_of(head_dim)["causal"][0], kernel, tmp_path)
        for name, cases in list(missed.items()):
            found = reports(kernel, library, cases)
            if found:
                assert any(re.search(RACE, text) for text in found)
                del missed[name]
        if not missed:
            break
    if (site.file, site.number) in REDUNDANT:
        assert missed, "this barrier is needed: take it off the list of redundant ones"
        return
    assert not missed, f"deleting the barrier at {site.file}:{site.line} went unnoticed: {missed}"


def test_the_list_of_redundant_barriers_names_existing_ones() -> None:
    known = {(site.file, site.number) for site in sites()}
    assert set(REDUNDANT) <= known
