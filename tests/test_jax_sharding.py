"""JAX on several devices: the recipes of docs/jax.md give what one device gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")


def test_recipes() -> None:
    worker = Path(__file__).with_name("jax_sharding_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip().endswith("done")
