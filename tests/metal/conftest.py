"""One simulator per test process, put back to its defaults before every test, with a cache of
compiled kernels that outlives the run (METAL_SIM_CACHE).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simulator import Simulator

DEFAULTS = {"check": True, "map": "row", "schedule": "fifo", "seed": 1, "shuffle": False}


@pytest.fixture(scope="session")
def loaded_simulator() -> Simulator:
    return Simulator()


@pytest.fixture
def simulator(loaded_simulator: Simulator) -> Simulator:
    loaded_simulator.set(**DEFAULTS)
    return loaded_simulator
