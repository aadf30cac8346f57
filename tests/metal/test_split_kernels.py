"""Few query rows with their keys in chunks: numbers against float64, and the same bits whatever
must not matter: lane map, schedule, simdgroups, neighbours, and a chunk that shows nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from register_cases import STATUS_GOOD, Register, fitting, run_register, run_split
from shader_cases import Case, compile_launch, make_tensors, worst_error
from shader_options import ShaderOptions
from simulator import Simulator
from test_register_kernels import OPTIONS, ROUNDINGS, bits
from test_shaders import MAPS, SCHEDULES

# Three chunks, the last one of a single key.
BASE = Case(batch=2, query_heads=6, kv_heads=2, seqlen_q=3, seqlen_k=65, head_dim=12, value_dim=9)
CHUNK = 32
ALIGNED = replace(BASE, head_dim=16, value_dim=32)
PROBLEMS = {
    "causal": BASE,
    "one row": replace(BASE, seqlen_q=1),
    "eight rows": replace(ALIGNED, seqlen_q=8),
    "window past a chunk": replace(ALIGNED, causal=False, window=(20, 0)),
    "lengths": replace(BASE, causal=False, key_length=7),
    "no keys": replace(ALIGNED, causal=False, key_length=0),
    "negative scale": replace(BASE, scale=-0.3),
    "zero scale": replace(BASE, scale=0.0),
    "no groups": replace(ALIGNED, query_heads=2),
}


def run(
    simulator: Simulator, register: Register, case: Case, chunk: int = CHUNK
) -> dict[str, np.ndarray]:
    tensors = make_tensors(case)
    for dispatch in run_split(simulator, register, case, tensors, chunk):
        assert dispatch.reports == []
    assert tensors.arrays["status"][0] == STATUS_GOOD
    return {name: tensors.arrays[name] for name in ("out", "lse")}


def assert_right(case: Case, results: dict[str, np.ndarray]) -> None:
    tensors = make_tensors(case)
    tensors.arrays.update(results)
    rounding = ROUNDINGS[case.dtype] * (2 if case.dtype == "float16" else 1)
    size = max(
        np.abs(np.nan_to_num(tensors.expected[name], posinf=0, neginf=0)).max() for name in results
    )
    assert worst_error(case, "forward", tensors) <= rounding * max(1.0, size)


@pytest.mark.parametrize("dtype", ROUNDINGS)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_numbers(problem: str, dtype: str, simulator: Simulator) -> None:
    case = replace(PROBLEMS[problem], dtype=dtype)
    assert_right(case, run(simulator, fitting("forward", case), case))


@pytest.mark.parametrize("options", OPTIONS)
def test_options(options: str, simulator: Simulator) -> None:
    case = replace(BASE, options=OPTIONS[options])
    assert_right(case, run(simulator, fitting("forward", case), case))


@pytest.mark.parametrize("options", [ShaderOptions(), OPTIONS["all"]], ids=["plain", "all"])
def test_same_bits_whatever_runs_first(options: ShaderOptions, simulator: Simulator) -> None:
    case = replace(BASE, options=options)
    expected = bits(run(simulator, fitting("forward", case), case))
    for simdgroups in (1, 4):
        register = fitting("forward", case, simdgroups=simdgroups)
        assert bits(run(simulator, register, case)) == expected, simdgroups
    for chosen in MAPS:
        simulator.set(map=chosen)
        assert bits(run(simulator, fitting("forward", case), case)) == expected, chosen
    for schedule in SCHEDULES:
        simulator.set(map="random:4", schedule=schedule)
        assert bits(run(simulator, fitting("forward", case), case)) == expected, schedule


@pytest.mark.parametrize("length", [None, 20])
def test_one_chunk_has_the_bits_of_a_call_that_is_not_split(
    length: int | None, simulator: Simulator
) -> None:
    """Alone, or among chunks that show nothing."""
    case = replace(BASE, seqlen_k=CHUNK if length is None else 65, key_length=length, causal=False)
    register = fitting("forward", case)
    tensors = make_tensors(case)
    run_register(compile_launch(simulator, register.launch()), register, case, tensors)
    whole = {name: tensors.arrays[name] for name in ("out", "lse")}
    assert bits(run(simulator, register, case)) == bits(whole)


def test_an_entry_alone_has_its_bits(simulator: Simulator) -> None:
    register = fitting("forward", BASE)
    both = run(simulator, register, BASE)
    alone = make_tensors(replace(BASE, batch=1))
    whole = make_tensors(BASE)
    for name in ("query", "key", "value"):
        alone.arrays[name][...] = whole.arrays[name][1:]
    run_split(simulator, register, replace(BASE, batch=1), alone, CHUNK)
    np.testing.assert_array_equal(alone.arrays["out"][0], both["out"][1])
    np.testing.assert_array_equal(alone.arrays["lse"][0], both["lse"][1])


@pytest.mark.parametrize("what", ["value", "key", "infinity"])
def test_values_that_are_not_finite(what: str, simulator: Simulator) -> None:
    case = replace(BASE, non_finite=what)
    assert_right(case, run(simulator, fitting("forward", case), case))
