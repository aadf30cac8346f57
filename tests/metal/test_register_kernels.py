"""The register kernels one by one: numbers against float64, and the same bits whatever must not
matter: lane map, schedule, exchange, tile geometry, neighbours, and how rows are copied.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from register_cases import REGISTER_KERNELS as KERNELS
from register_cases import (
    STATUS_GOOD,
    STATUS_LANE_MAP,
    STATUS_NON_FINITE,
    Options,
    Register,
    fitting,
    run_register,
)
from shader_cases import (
    Case,
    compile_launch,
    make_tensors,
    outputs,
    widen,
    worst_error,
)
from shader_options import MIXED, ShaderOptions
from simulator import Simulator
from test_shaders import MAPS, ROUNDINGS, SCHEDULES

BASE = Case(head_dim=12, value_dim=9)
ALIGNED = Case(head_dim=16, value_dim=32)
PROBLEMS = {
    "ragged": BASE,
    "aligned": ALIGNED,
    "full": replace(ALIGNED, causal=False, seqlen_q=64, seqlen_k=48),
    "vectors": replace(BASE, head_dim=20, value_dim=12),
    "window": replace(ALIGNED, causal=False, window=(7, 3), seqlen_q=70, seqlen_k=70),
    "lengths": replace(ALIGNED, causal=False, key_length=23),
    "dead rows": replace(ALIGNED, seqlen_q=60, seqlen_k=20),
    "one row": replace(ALIGNED, seqlen_q=1, seqlen_k=50),
    "negative scale": replace(ALIGNED, scale=-0.3),
    "zero scale": replace(ALIGNED, scale=0.0),
    "groups": replace(ALIGNED, batch=2, query_heads=6, kv_heads=2),
}
SHAPES = {
    "1x2": {"row_fragments": 1, "simdgroups": 2},
    "2x2": {"row_fragments": 2, "simdgroups": 2},
    "1x4": {"row_fragments": 1, "simdgroups": 4},
    "read again": {"row_fragments": 2, "simdgroups": 1, "held": False, "value_held": False},
}


def run(
    simulator: Simulator, register: Register, case: Case, options: Options | None = None
) -> dict[str, np.ndarray]:
    """The outputs of one pass, which the checker finds nothing wrong with."""
    library = compile_launch(simulator, register.launch())
    tensors = make_tensors(case)
    for dispatch in run_register(library, register, case, tensors, options):
        assert dispatch.reports == []
    assert tensors.arrays["status"][0] == STATUS_GOOD
    return {name: tensors.arrays[name] for name in outputs(case, register.kernel)}


def bits(results: dict[str, np.ndarray]) -> bytes:
    return b"".join(x.tobytes() for x in results.values())


def assert_right(register: Register, case: Case, results: dict[str, np.ndarray]) -> None:
    tensors = make_tensors(case)
    tensors.arrays.update(results)
    expected = [tensors.expected[name] for name in outputs(case, register.kernel)]
    size = max(float(np.abs(x[np.isfinite(x)]).max(initial=1.0)) for x in expected)
    # Factors of 16 bits are rounded a second time: the weights of the second product.
    rounding = ROUNDINGS[case.dtype] * (2 if case.dtype == "float16" else 1)
    assert worst_error(case, register.kernel, tensors) <= rounding * size


@pytest.mark.parametrize("dtype", ROUNDINGS)
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_numbers(kernel: str, problem: str, dtype: str, simulator: Simulator) -> None:
    case = replace(PROBLEMS[problem], dtype=dtype)
    register = fitting(kernel, case)
    assert_right(register, case, run(simulator, register, case))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("problem", ["ragged", "aligned", "window"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_geometry_changes_nothing(
    kernel: str, problem: str, shape: str, simulator: Simulator
) -> None:
    case = PROBLEMS[problem]
    expected = run(simulator, fitting(kernel, case), case)
    register = fitting(kernel, case, **SHAPES[shape])
    assert bits(run(simulator, register, case)) == bits(expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_work_goes_with_the_window(kernel: str, simulator: Simulator) -> None:
    """16 own rows and a window of 32 see 47 of the others, which touch 4 tiles of 20 at most."""
    wide = replace(ALIGNED, seqlen_q=320, seqlen_k=320, causal=False)
    register = fitting(kernel, wide)
    library = compile_launch(simulator, register.launch())
    counts = [
        sum(
            dispatch.counters["matrix_multiplies"]
            for dispatch in run_register(library, register, case, make_tensors(case))
        )
        for case in (wide, replace(wide, window=(31, 0)))
    ]
    assert 0 < counts[1] <= counts[0] * 4 / 20


@pytest.mark.parametrize("kernel", KERNELS)
def test_same_bits_under_every_map_and_schedule(kernel: str, simulator: Simulator) -> None:
    register = fitting(kernel, BASE, row_fragments=2)
    first = bits(run(simulator, register, BASE))
    for chosen in MAPS:
        simulator.set(map=chosen)
        assert bits(run(simulator, register, BASE)) == first, chosen
    for schedule in SCHEDULES:
        simulator.set(map="random:4", schedule=schedule)
        assert bits(run(simulator, register, BASE)) == first, schedule


@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_both_exchanges_give_the_same_bits(dtype: str, simulator: Simulator) -> None:
    case = replace(BASE, dtype=dtype)
    simulator.set(map="apple")
    by_table = run(simulator, fitting("forward", case, row_fragments=2), case)
    shuffled = fitting("forward", case, row_fragments=2, exchange="apple")
    for schedule in SCHEDULES:
        simulator.set(schedule=schedule)
        assert bits(run(simulator, shuffled, case)) == bits(by_table)


@pytest.mark.parametrize("chosen", ["row", "random:1", "apple_transposed", "adjacent:1"])
def test_a_foreign_map_is_refused(chosen: str, simulator: Simulator) -> None:
    simulator.set(map=chosen)
    register = fitting("forward", BASE, exchange="apple")
    library = compile_launch(simulator, register.launch())
    tensors = make_tensors(BASE)
    for dispatch in run_register(library, register, BASE, tensors):
        assert dispatch.reports == []
    assert tensors.arrays["status"][0] == STATUS_LANE_MAP
    assert np.isnan(tensors.arrays["out"]).all()


@pytest.mark.parametrize("slack", [0.0, 8.0])
@pytest.mark.parametrize("problem", ["ragged", "window", "negative scale"])
def test_a_lagging_maximum(problem: str, slack: float, simulator: Simulator) -> None:
    """Right with any slack; and a row has the bits it has alone, among neighbours that rise."""
    case = PROBLEMS[problem]
    register = fitting("forward", case, row_fragments=2, block=8)
    options = Options(max_slack=slack)
    results = run(simulator, register, case, options)
    assert_right(register, case, results)
    last = replace(case, seqlen_q=3)
    library = compile_launch(simulator, register.launch())
    tensors, whole = make_tensors(last), make_tensors(case)
    for name in ("key", "value"):
        tensors.arrays[name][...] = whole.arrays[name]
    tensors.arrays["query"][...] = whole.arrays["query"][:, -3:]
    run_register(library, register, last, tensors, options)
    np.testing.assert_array_equal(tensors.arrays["out"], results["out"][:, -3:])
    np.testing.assert_array_equal(tensors.arrays["lse"], results["lse"][:, :, -3:])


@pytest.mark.parametrize("scale", [0.37, 5.3, -11.0])
@pytest.mark.parametrize("options", ["", "softcap", "alibi"])
def test_one_key_is_the_result(options: str, scale: float, simulator: Simulator) -> None:
    """Bit for bit: its weight is 1."""
    case = replace(BASE, seqlen_k=1, causal=False, scale=scale)
    case = replace(case, options=OPTIONS[options] if options else ShaderOptions())
    results = run(simulator, fitting("forward", case), case)
    value = make_tensors(case).arrays["value"]
    np.testing.assert_array_equal(results["out"], np.broadcast_to(value, results["out"].shape))


def test_rows_of_the_lowest_finite_values(simulator: Simulator) -> None:
    """A value like any other: all keys weigh the same."""
    case = replace(BASE, causal=False, options=ShaderOptions(mask="float32", mask_axes="k"))
    register = fitting("forward", case)
    tensors = make_tensors(case)
    lowest = np.finfo(np.float32).min
    tensors.arrays["mask"][...] = lowest
    tensors.arrays["mask_tiles"][...] = MIXED
    for dispatch in run_register(
        compile_launch(simulator, register.launch()), register, case, tensors
    ):
        assert dispatch.reports == []
    mean = tensors.arrays["value"].mean(axis=1, dtype=np.float64, keepdims=True)
    np.testing.assert_allclose(
        tensors.arrays["out"], np.broadcast_to(mean, tensors.arrays["out"].shape), atol=1e-6
    )
    np.testing.assert_array_equal(tensors.arrays["lse"], lowest)


WIDEST = {"block": 8, "simdgroups": 2, "held": False, "value_held": False}


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("forward", "float32"),
        ("backward_dq", "float32"),
        ("backward_dv", "float32"),
        ("backward_dk", "float32"),
        ("backward_dk", "bfloat16"),
    ],
)
def test_widest_tiles(kernel: str, dtype: str, simulator: Simulator) -> None:
    """Above 128, in blocks as the host takes them: one tile that rows do not fill, one narrower."""
    case = replace(BASE, head_dim=250, value_dim=184, dtype=dtype)
    register = fitting(kernel, case, **WIDEST)
    results = run(simulator, register, case)
    assert_right(register, case, results)
    vectors = run(simulator, register, case, Options(unchecked=False))
    assert bits(vectors) == bits(results)


@pytest.mark.parametrize("options", [Options(vectors=False), Options(unchecked=False)], ids=str)
@pytest.mark.parametrize("problem", ["aligned", "vectors", "full"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_how_rows_are_copied_changes_nothing(
    kernel: str, problem: str, options: Options, simulator: Simulator
) -> None:
    case = PROBLEMS[problem]
    register = fitting(kernel, case, held=False, value_held=False)
    expected = bits(run(simulator, register, case))
    assert bits(run(simulator, register, case, options)) == expected


@pytest.mark.parametrize("dtype", ROUNDINGS)
@pytest.mark.parametrize("what", ["value", "key", "query", "infinity"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_values_that_are_not_finite(
    kernel: str, what: str, dtype: str, simulator: Simulator
) -> None:
    """They reach the rows that see them, as float64 says, and leave no trace elsewhere."""
    case = replace(BASE, dtype=dtype, non_finite=what)
    register = fitting(kernel, case, row_fragments=2)
    results = run(simulator, register, case)
    assert_right(register, case, results)
    clean = run(simulator, register, replace(case, non_finite=""))
    expected = make_tensors(case).expected
    untouched = make_tensors(replace(case, non_finite="")).expected
    changed = False
    for name, array in results.items():
        same = expected[name] == untouched[name]
        np.testing.assert_array_equal(widen(array)[same], widen(clean[name])[same])
        changed = changed or not same.all()
    assert changed or (kernel == "backward_dv" and what in ("value", "infinity"))


@pytest.mark.parametrize("what", ["", "value", "key", "query"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_values_that_are_not_finite_are_told(kernel: str, what: str, simulator: Simulator) -> None:
    """A kernel that does not select says so, exactly where its second product would spread them."""
    spread = {"forward": ("value", "key"), "backward_dq": ("key",)}.get(kernel, ("query",))
    case = replace(BASE, non_finite=what)
    register = fitting(kernel, case)
    library = compile_launch(simulator, register.launch())
    tensors = make_tensors(case)
    for dispatch in run_register(library, register, case, tensors, Options(selects=False)):
        assert dispatch.reports == []
    expected = STATUS_NON_FINITE if what in spread else STATUS_GOOD
    assert tensors.arrays["status"][0] == expected


@pytest.mark.parametrize("kernel", KERNELS)
def test_selecting_changes_no_bits(kernel: str, simulator: Simulator) -> None:
    register = fitting(kernel, BASE)
    plain = run(simulator, register, BASE, Options(selects=False))
    assert bits(run(simulator, register, BASE, Options(selects=True))) == bits(plain)


@pytest.mark.parametrize("problem", ["ragged", "window", "groups"])
def test_both_gradients_at_once_are_those_alone(problem: str, simulator: Simulator) -> None:
    case = PROBLEMS[problem]
    both = run(simulator, fitting("backward_dkv", case), case)
    for kernel, name in (("backward_dv", "dv"), ("backward_dk", "dk")):
        alone = run(simulator, fitting(kernel, case), case)
        np.testing.assert_array_equal(alone[name], both[name])


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k != "forward"])
def test_accumulate_adds_to_what_is_there(kernel: str, simulator: Simulator) -> None:
    register = fitting(kernel, BASE)
    library = compile_launch(simulator, register.launch())
    fresh, added = make_tensors(BASE), make_tensors(BASE)
    random = np.random.default_rng(1)
    before = {}
    for name in outputs(BASE, kernel):
        before[name] = random.standard_normal(added.arrays[name].shape).astype(np.float32)
        added.arrays[name][...] = before[name]
    run_register(library, register, BASE, fresh)
    run_register(library, register, BASE, added, Options(accumulate=True))
    for name, start in before.items():
        np.testing.assert_array_equal(added.arrays[name], start + fresh.arrays[name])


OPTIONS = {
    "bool mask": ShaderOptions(mask="bool"),
    "additive mask": ShaderOptions(mask="float32"),
    "half mask by head": ShaderOptions(mask="float16", mask_axes="hk"),
    "softcap": ShaderOptions(softcap=1.5),
    "alibi": ShaderOptions(alibi="head"),
    "sinks": ShaderOptions(sinks=True),
    "dropout": ShaderOptions(dropout_p=0.3),
    "all": ShaderOptions(mask="bfloat16", softcap=2.0, alibi="batch", sinks=True, dropout_p=0.2),
}


@pytest.mark.parametrize("dtype", ROUNDINGS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_options(kernel: str, options: str, dtype: str, simulator: Simulator) -> None:
    case = replace(BASE, batch=2, query_heads=4, kv_heads=2, dtype=dtype, options=OPTIONS[options])
    register = fitting(kernel, case, row_fragments=2)
    assert_right(register, case, run(simulator, register, case))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_options_in_every_geometry(kernel: str, shape: str, simulator: Simulator) -> None:
    case = replace(ALIGNED, seqlen_q=70, options=OPTIONS["all"])
    expected = run(simulator, fitting(kernel, case), case)
    register = fitting(kernel, case, **SHAPES[shape])
    assert bits(run(simulator, register, case)) == bits(expected)
