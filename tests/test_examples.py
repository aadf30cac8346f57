"""The examples, at small size."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load(name: str) -> ModuleType:
    """The example as a module, which its dataclasses look for."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_training_follows_torchs(tmp_path: Path) -> None:
    """The losses fall, and stay as near to torch's as torch's own two ways are to each other."""
    example = load("train_char")
    text = example.standard_library_text()
    assert len(text) > 50_000
    sizes = example.Sizes(layers=2, heads=2, width=32, context=48, batch=8)
    found = example.curves(40, sizes, text)
    mine = found["flashattn"]
    assert mine[-1] < mine[0] - 0.5
    apart, noise = example.largest_differences(found)
    # Three times, as tests/tolerance.py grants gradients, of which a loss is the sum.
    assert 0 < apart <= 3 * noise
    if importlib.util.find_spec("matplotlib") is not None:
        example.plot(found, str(tmp_path / "curves.svg"))
        assert (tmp_path / "curves.svg").read_text().count("<path") > 4
