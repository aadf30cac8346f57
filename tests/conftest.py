"""The `target` fixture: one run of a test per backend, instruction set and simulated device; and
hypothesis profiles.

FLASHATTN_HYPOTHESIS picks the profile: "ci" (default: derandomised, small), "simulated"
(derandomised, 250 problems forward and as many backward) or "nightly" (random, large).
"""

from __future__ import annotations

import os
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
