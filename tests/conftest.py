"""The `target` fixture: one run of a test per backend, instruction set and simulated device; and
hypothesis profiles.

FLASHATTN_HYPOTHESIS picks the profile: "ci" (default: derandomised, small), "simulated"
(derandomised, 250 problems forward and as many backward) or "nightly" (random, large).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from targets import Target, all_targets

_SHARED = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("ci", max_examples=60, derandomize=True, database=None, **_SHARED)
settings.register_profile("simulated", max_examples=250, derandomize=True, database=None, **_SHARED)
settings.register_profile("nightly", max_examples=1500, print_blob=True, **_SHARED)
settings.load_profile(os.environ.get("FLASHATTN_HYPOTHESIS", "ci"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames:
        metafunc.parametrize("target", all_targets(), ids=lambda t: t.id, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """FLASHATTN_TEST_ROTATE: of the simulated devices, a test keeps those at these numbers, counted
    from the one that its name picks: "0" one device each, "1,2,3,4" the other four of five.
    """
    rotate = os.environ.get("FLASHATTN_TEST_ROTATE")
    if not rotate:
        return
    turns = {int(turn) for turn in rotate.split(",")}
    devices = [target.id for target in all_targets() if target.simulated is not None]

    def is_its_turn(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        target = callspec.params.get("target") if callspec is not None else None
        if target is None or target.simulated is None:
            return True
        name = item.nodeid.replace(target.id, "")
        first = zlib.crc32(name.encode())
        return (devices.index(target.id) - first) % len(devices) in turns

    others = [item for item in items if not is_its_turn(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if is_its_turn(item)]


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """A way to compute, made current for the test; the process is put back behind it."""
    if request.param.isa is None:
        request.param.activate()
        yield request.param
        return
    from flashattn import _core

    before = _core.active_isa()
    request.param.activate()
    yield request.param
    _core.set_isa(before)
