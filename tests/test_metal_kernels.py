"""What FLASHATTN_METAL_KERNELS chooses between: register kernels for any lane map, and the staged
ones. Both are right under every option; register kernels have the same bits whatever the lane map,
and next to values that are not finite. The other test files run the default.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from cases import DTYPES, Case, build, check_backward, check_forward
from targets import Target
from test_forward import OPTIONS

SHAPES = [
    Case(2, 4, 2, 37, 50, 20, 12),
    Case(1, 2, 1, 70, 70, 64),
    Case(1, 2, 1, 40, 48, 128),
    Case(1, 1, 1, 19, 35, 200),  # the staged kernels do this one in any case
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
    from flashattn import _core

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


def test_show_config_says_which(target: Target, kernels: str) -> None:
    import flashattn as fa

    (device,) = (b.device for b in fa.backends() if b.name == "metal")
    said = {"any": "register kernels for any lane map", "staged": "staged kernels"}[kernels]
    assert said in device


def test_an_unknown_choice_is_named(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHATTN_METAL_KERNELS", "fastest")
    problem = build(Case())
    with pytest.raises(ValueError, match=r"FLASHATTN_METAL_KERNELS \(fastest\)"):
        target.forward(*problem.inputs)
