"""Facts about the machine and the packages, for the JSON results, and where those go."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import flashattn as fa

RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("flashattn", "numpy", "ml_dtypes", "torch", "jax", "jaxlib", "mlx", "openvino")
_PACKAGES += ("onnxruntime", "onnx")


def facts() -> dict[str, Any]:
    """Processor, instruction set, compiler, load and versions. No names of hosts or users."""
    config = fa.show_config("dict")
    assert config is not None
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": config["cpu"]["model"],
        "cores": config["cpu"]["cores"],
        "isa": config["cpu"]["isa"],
        "compiler": config["compiler"],
        "python": config["python"],
        "versions": {**versions, "flashattn": fa.__version__},
        "load_average": round(os.getloadavg()[0], 1),
    }


def write(name: str, result: dict[str, Any], folder: Path = RESULTS) -> Path:
    """NAME.json in the folder, with the facts in front."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"machine": facts(), **result}, indent=1) + "\n")
    return path
