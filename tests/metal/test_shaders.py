"""The shaders kernel by kernel: numbers against float64, the same bits under every fragment map and
schedule, and accumulation, which no public call asks for.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shader_cases import (
    KERNELS,
    OUTPUTS,
    Case,
    compile_kernel,
    make_tensors,
    run_kernel,
    widen,
    worst_error,
)
from simulator import Simulator

MAPS = ("row", "column", "apple", "random:1", "random:2", "random:3")
SCHEDULES = ("fifo", "lifo", "random", "priority")
BASE = Case(head_dim=12, value_dim=9)
# One rounding of the storage type, and for float32 the sums of at most 100 products of order one.
ROUNDINGS = {"float32": 32 * 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.mark.parametrize("dtype", ROUNDINGS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_numbers(kernel: str, dtype: str, simulator: Simulator) -> None:
    simulator.set(map="row", schedule="fifo")
    case = replace(BASE, dtype=dtype)
    tensors = make_tensors(case)
    run = run_kernel(compile_kernel(simulator, case, kernel), case, kernel, tensors)
    assert run.reports == []
    size = max(
        float(np.abs(tensors.expected[name][np.isfinite(tensors.expected[name])]).max())
        for name in OUTPUTS[kernel]
    )
    # The delta of 16-bit tensors is taken of an out that is itself rounded.
    factor = 4 if kernel == "delta" else 1
    assert worst_error(case, kernel, tensors) <= factor * ROUNDINGS[dtype] * max(size, 1.0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_same_bits_under_every_map_and_schedule(kernel: str, simulator: Simulator) -> None:
    library = compile_kernel(simulator, BASE, kernel)

    def bits(chosen: str, schedule: str) -> bytes:
        simulator.set(map=chosen, schedule=schedule)
        tensors = make_tensors(BASE)
        assert run_kernel(library, BASE, kernel, tensors).reports == []
        return b"".join(tensors.arrays[name].tobytes() for name in OUTPUTS[kernel])

    first = bits(MAPS[0], SCHEDULES[0])
    for chosen in MAPS:
        assert bits(chosen, SCHEDULES[0]) == first, chosen
    for schedule in SCHEDULES:
        assert bits("random:4", schedule) == first, schedule


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.startswith("backward")])
def test_accumulate_adds_to_what_is_there(kernel: str, simulator: Simulator) -> None:
    simulator.set(map="row", schedule="fifo")
    library = compile_kernel(simulator, BASE, kernel)
    (name,) = OUTPUTS[kernel]
    fresh, added = make_tensors(BASE), make_tensors(BASE)
    before = np.random.default_rng(1).standard_normal(added.arrays[name].shape).astype(np.float32)
    added.arrays[name][...] = before
    assert run_kernel(library, BASE, kernel, fresh).reports == []
    assert run_kernel(library, BASE, kernel, added, accumulate=True).reports == []
    np.testing.assert_array_equal(widen(added.arrays[name]), before + fresh.arrays[name])


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "delta"])
def test_work_goes_with_the_window(kernel: str, simulator: Simulator) -> None:
    """32 own rows and a window of 32 see 63 of the others, which touch 5 tiles of 20 at most."""
    wide = replace(BASE, seqlen_q=320, seqlen_k=320, causal=False)
    library = compile_kernel(simulator, wide, kernel)
    counts = []
    for case in (wide, replace(wide, window=(31, 0))):
        run = run_kernel(library, case, kernel, make_tensors(case))
        assert run.reports == []
        counts.append(run.counters["matrix_multiplies"])
    assert 0 < counts[1] <= counts[0] * 5 / 20
