"""The benchmarks' runner works: a quick run of a few cells, its bars and its pictures."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from targets import chosen_is_simulated

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"

pytestmark = pytest.mark.skipif(chosen_is_simulated(), reason="times mean nothing there")


def run(*command: str) -> str:
    finished = subprocess.run(
        [sys.executable, *command], cwd=FOLDER, check=True, capture_output=True, text=True
    )
    return finished.stdout


def test_a_quick_run(tmp_path: Path) -> None:
    peers = ["torch"] if importlib.util.find_spec("torch") is not None else []
    quick = ("--quick", "--passes", "forward", "--dtypes", "float32", "--output", str(tmp_path))
    text = run("run.py", *quick, "--suite", "cpu_vs_peers", "scaling", "--peers", *peers)
    assert "bars met in the cells" in text
    bars, scaling = (
        json.loads((tmp_path / f"quick_{suite}.json").read_text())
        for suite in ("cpu_vs_peers", "scaling")
    )
    assert bars["machine"]["cores"] >= 1
    for cell in (*bars["cells"], *scaling["cells"]):
        spread = cell["spread"]["flashattn"]
        assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        assert set(cell["ratios"]) == set(peers)
    assert all(cell["bars"] for cell in bars["cells"])
    names = {cell["series"] for cell in scaling["cells"]}
    assert names >= {"seqlen", "window", "batch"}
    if importlib.util.find_spec("matplotlib") is not None:
        places = ("--results", str(tmp_path), "--to", str(tmp_path))
        drawn = run("plot.py", *places, "--scaling", "quick_scaling.json")
        assert "throughput.svg" in drawn
        assert (tmp_path / "scaling.svg").read_text().count("<path") > 20


def test_work_of_windows() -> None:
    """Pairs of a causal window, counted one by one."""
    spec = importlib.util.spec_from_file_location("cells", FOLDER / "cells.py")
    assert spec is not None
    assert spec.loader is not None
    cells = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cells)
    for window in (1, 5, 16, 40):
        cell = {"pass": "forward", "shape": (2, 3, 16, 8), "causal": True, "window": window}
        pairs = sum(min(row + 1, window) for row in range(16))
        counted = cells.work_of(cell) / (4 * 2 * 3 * 8)
        assert abs(counted - pairs) <= 16 / 2  # half a pair a row: the diagonal counts as half
