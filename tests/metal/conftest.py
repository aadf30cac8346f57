"""One simulator per test process, put back to its defaults before every test, with a cache of
compiled kernels that outlives the run (METAL_SIM_CACHE).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "translate"))

from build_kernel import find_clang
from simulator import Simulator
from tokens import TranslationError

DEFAULTS = {"check": True, "map": "row", "schedule": "fifo", "seed": 1, "shuffle": False}


@pytest.fixture(scope="session", autouse=True)
def clang() -> list[str]:
    """The command of the compiler; without one nothing here can run."""
    try:
        return find_clang("")
    except TranslationError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def loaded_simulator() -> Simulator:
    return Simulator()


@pytest.fixture
def simulator(loaded_simulator: Simulator) -> Simulator:
    loaded_simulator.set(**DEFAULTS)
    return loaded_simulator
