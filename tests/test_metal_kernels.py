"""What FLASHATTN_METAL_KERNELS chooses between: register kernels for any lane map, and the staged
ones. Both are right under every option; register kernels have the same bits whatever the lane map,
and next to values that are not finite. The other test files run the default.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from typing import Any

import flashattn as fa
import flashattn._core
import numpy as np
import pytest
from cases import DTYPES, Case, build, check_backward, check_forward
from targets import Target
from test_forward import OPTIONS

_core: Any = flashattn._core  # with functions of simulated builds

SHAPES = [
    Case(2, 4, 2, 37, 50, 20, 12),
    Case(1, 2, 1, 70, 70, 64),
    Case(1, 2, 1, 40, 48, 128),
    Case(1, 1, 1, 19, 35, 200),  # the staged kernels do some of this one in any case
]


@pytest.fixture(autouse=True, params=["any", "staged"])
def kernels(request: pytest.FixtureRequest, target: Target, monkeypatch: pytest.MonkeyPatch) -> str:
    if target.backend != "metal":
        pytest.skip("no such kernels here")
    monkeypatch.setenv("FLASHATTN_METAL_KERNELS", request.param)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda c: c.id)
def test_matches_the_oracle(target: Target, shape: Case, dtype: str) -> None:
    case = replace(shape, dtype=dtype, causal=True)
    check_forward(target, case)
    check_backward(target, case)


@pytest.mark.parametrize("name", OPTIONS)
def test_score_options(target: Target, name: str) -> None:
    check_backward(target, replace(Case(2, 4, 2, 37, 50, 20, 12), **OPTIONS[name]))


def test_a_hidden_nan_leaves_no_trace(target: Target) -> None:
    """The kernels notice it and run again, selecting, to the same bits."""
    problem = build(Case(1, 2, 1, 37, 50, 20, 12, causal=True))
    clean = target.forward(*problem.inputs, **problem.options)
    query, key, value = (x.copy() for x in problem.inputs)
    value[:, -1] = np.nan
    out, lse = target.forward(query, key, value, **problem.options)
    np.testing.assert_array_equal(out[:, :-1], clean[0][:, :-1])
    np.testing.assert_array_equal(lse, clean[1])
    assert np.isnan(out[:, -1]).all()


def test_another_lane_map_changes_no_bits(target: Target, kernels: str) -> None:
    """The map is asked for once; a kernel that meets another says so, and another one runs."""
    if target.simulated is None or kernels == "staged":
        pytest.skip("needs a device with more than one map, and kernels that care")
    os.environ["FLASHATTN_METAL_KERNELS"] = "register"  # the fixture puts it back
    _core.set_simulated_metal("map", "apple")
    _core.forget_lane_maps()
    problem = build(Case(1, 2, 1, 70, 70, 64, causal=True))
    first = target.forward(*problem.inputs, **problem.options)
    for other in ("random:5", "row"):
        _core.set_simulated_metal("map", other)
        for got, expected in zip(
            target.forward(*problem.inputs, **problem.options), first, strict=True
        ):
            np.testing.assert_array_equal(got, expected)


def test_a_refused_kernel_makes_way(target: Target, kernels: str) -> None:
    """The device's compiler fails on register kernels: the staged ones run, and it is said why."""
    if target.simulated is None or kernels == "staged":
        pytest.skip("needs a compiler that can be made to fail")
    refuse = ctypes.CDLL(_core.__file__).flashattn_simulated_refuse_pipelines
    problem = build(Case(1, 2, 1, 37, 50, 104, 104, causal=True))  # no other test has these kernels
    os.environ["FLASHATTN_METAL_KERNELS"] = "staged"  # the fixture puts it back
    expected = target.forward(*problem.inputs, **problem.options)
    os.environ["FLASHATTN_METAL_KERNELS"] = "register"
    _core.forget_lane_maps()
    refuse(b"register_")
    try:
        for got, bits in zip(
            target.forward(*problem.inputs, **problem.options), expected, strict=True
        ):
            np.testing.assert_array_equal(got, bits)
        (device,) = (b.device for b in fa.backends() if b.name == "metal")
        assert "staged kernels" in device
        # Of the exact size, or of one that is there already and has room.
        assert "because: metal: kernel register_forward_float32_d" in device, device
    finally:
        refuse(None)
        _core.forget_lane_maps()
    target.forward(*problem.inputs, **problem.options)
    (device,) = (b.device for b in fa.backends() if b.name == "metal")
    assert "because" not in device


def test_show_config_says_which(target: Target, kernels: str) -> None:
    (device,) = (b.device for b in fa.backends() if b.name == "metal")
    said = {"any": "register kernels for any lane map", "staged": "staged kernels"}[kernels]
    assert said in device


def test_an_unknown_choice_is_named(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHATTN_METAL_KERNELS", "fastest")
    problem = build(Case())
    with pytest.raises(ValueError, match=r"FLASHATTN_METAL_KERNELS \(fastest\)"):
        target.forward(*problem.inputs)
