"""The cost model: what it counts is what a kernel does, and no kernel costs more than recorded."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from shader_cases import Case, staged
from simulator import METAL, Simulator

sys.path.insert(0, str(METAL / "cost_model"))

from costed import Costed, costed_kernels
from decode import DecodeCosted, decode_kernels, decode_table, measure_decode
from measure import measure, translated
from model import FITS, Shape, residency, slots, slow_share
from record import COUNTS, DECODE_COUNTS, PAGE, row, table
from registers import MOST, registers, spills, to_ptx

RECORDED = json.loads(COUNTS.read_text())
DECODE_RECORDED = json.loads(DECODE_COUNTS.read_text())
# Counts are whole numbers per tile; the recorded slots are rounded to hundredths.
ROUNDING = 0.01


@pytest.mark.parametrize("costed", costed_kernels(), ids=lambda costed: costed.name)
def test_no_kernel_got_worse(costed: Costed, simulator: Simulator) -> None:
    """Slower on purpose? Run cost_model/record.py, and say in the change why it pays."""
    recorded = RECORDED[costed.name]
    measured = measure(simulator, costed.name, costed.launch, costed.head_dim, costed.dtype)
    now = row(costed, measured, recorded["registers"])
    assert now["barriers_per_tile"] <= recorded["barriers_per_tile"]
    assert now["threadgroup_bytes"] <= recorded["threadgroup_bytes"]
    for slots_now, slots_before in zip(now["slots"], recorded["slots"], strict=True):
        assert slots_now <= slots_before + ROUNDING


@pytest.mark.parametrize("costed", decode_kernels(), ids=lambda costed: costed.name)
def test_no_key_of_decode_got_dearer(costed: DecodeCosted, simulator: Simulator) -> None:
    recorded = DECODE_RECORDED[costed.name]
    now = measure_decode(simulator, costed, recorded["registers"])
    assert now["barriers_per_block"] <= recorded["barriers_per_block"] <= 2
    assert now["threadgroup_bytes"] <= recorded["threadgroup_bytes"]
    for cycles_now, cycles_before in zip(now["cycles"], recorded["cycles"], strict=True):
        assert cycles_now <= cycles_before + ROUNDING


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize("costed", costed_kernels(), ids=lambda costed: costed.name)
def test_no_kernel_needs_more_registers(costed: Costed, tmp_path: Path) -> None:
    recorded = RECORDED[costed.name]["registers"]
    if recorded == MOST:
        return  # it may spill with as many as ptxas knows, and no more can be asked for
    assert not spills(to_ptx(translated(costed.launch), tmp_path), recorded)


def test_the_records_and_the_page_name_the_kernels() -> None:
    assert list(RECORDED) == [costed.name for costed in costed_kernels()]
    assert table(RECORDED) in PAGE.read_text()
    assert list(DECODE_RECORDED) == [costed.name for costed in decode_kernels()]
    assert decode_table(DECODE_RECORDED) in PAGE.read_text()


def test_counts_of_a_known_kernel(simulator: Simulator) -> None:
    """A tile of the staged forward kernel, counted by hand from its text."""
    launch = staged(Case(head_dim=64, value_dim=64), "forward")
    counts = measure(simulator, "forward", launch, 64, "float32").counts
    strips, fragments = 32 // 8, 16 // 8
    assert counts["matrix_multiplies"] == strips * 2 * (64 // 8) * fragments
    # K and V fragments, the strip's weights, the factor tile.
    assert counts["matrix_loads_threadgroup"] == strips * (2 * 8 * fragments + fragments + 1)
    assert counts["matrix_stores_threadgroup"] == strips * fragments
    assert counts["threadgroup_barriers"] == 2
    assert counts["simdgroup_barriers"] == strips * 3
    assert counts["exponentials"] == 32 * 16 + 128
    assert counts["scalar_loads_device"] == 2 * 16 * 64


def test_a_costlier_kernel_is_noticed(simulator: Simulator) -> None:
    """The same kernel with narrower blocks stages more per score."""
    wide = staged(Case(head_dim=64, value_dim=64), "forward")
    narrow = replace(
        wide, instantiation=wide.instantiation.replace("32, 16)", "32, 8)"), block_columns=8
    )
    costs = [
        row(
            Costed("forward", launch, 64, "float32"),
            measure(simulator, "forward", launch, 64, "float32"),
            97,
        )["slots"]
        for launch in (wide, narrow)
    ]
    assert all(a < b for a, b in zip(*costs, strict=True))


def test_the_model_answers_as_a_machine_would() -> None:
    shape = Shape(64, 32, 4, "float", useful=133)
    base = dict.fromkeys(("logarithms", "votes", "shuffles", "simdgroup_barriers"), 0.0)
    base |= {"exponentials": 2048.0, "threadgroup_barriers": 2.0, "matrix_multiplies": 512.0}
    base |= {"matrix_bytes_threadgroup": 65536.0, "scalar_bytes_threadgroup": 0.0}
    base |= {"matrix_bytes_device": 0.0, "scalar_bytes_device": 0.0}
    for fit in FITS.values():
        # 512 products of 18 cycles on four schedulers for 2048 scores bound it from below.
        bound = 512 * 18 / 4 * 128 / 2048
        assert bound < slots(base, shape, 64, 16384, fit) < 1.6 * bound
        for more in ("matrix_multiplies", "matrix_bytes_threadgroup", "exponentials", "votes"):
            changed = base | {more: base[more] * 2 + 100}
            assert slots(changed, shape, 64, 16384, fit) > slots(base, shape, 64, 16384, fit)
        assert slots(base, shape, 128, 32768, fit) > slots(base, shape, 64, 16384, fit)
    assert residency(shape, 128, 16384) == 3
    assert residency(shape, 64, 32768) == 1
    assert slow_share(8, 32, 4096, 0.0) > slow_share(8, 32, 4096, 8.0) == pytest.approx(1 / 128)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
def test_the_register_proxy_counts_fragments() -> None:
    """Twice the head dimension, twice the fragments: 32 more registers for Q and O at least."""
    counts = [
        registers(translated(staged(Case(head_dim=dim, value_dim=dim), "forward")))
        for dim in (32, 64)
    ]
    assert counts[1] - counts[0] >= 16
