"""What a unit of the check program is, and the numbers of shaders/abi.h that units need."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SHADERS = ROOT / "shaders"

BARRIER = re.compile(r"\b(?:threadgroup|simdgroup)_barrier\([^;]*\);")
# Function constants of shaders/abi.h. Every option but softcap can be on and change no result: a
# mask of zeros, slopes of 0, sinks of -inf, dropout that keeps everything, entries where they are
# without a table.
IDS = {
    name: int(number)
    for name, number in re.findall(r"kConstant(\w+) = (\d+)", (SHADERS / "abi.h").read_text())
}
NEUTRAL = sum(1 << IDS[n] for n in ("HasModifiers", "HasAlibi", "HasMask", "HasDropout"))
DROPOUT = sum(1 << IDS[n] for n in ("HasModifiers", "HasDropout"))
RAGGED = 1 << IDS["IsRagged"]
STORAGES = {
    "float": ("float32", "kFloat32"),
    "half": ("float16", "kFloat16"),
    "Bfloat16": ("bfloat16", "kBFloat16"),
}


@dataclass
class Unit:
    """One translation unit: a shader with instances under one map."""

    name: str
    shader: str
    instances: list[tuple[str, int, int]]
    map: int = 1
    constants: int = 0  # bit n: function constant n is on
    fault: bool = False
    files: dict[str, str] = field(default_factory=dict)  # changed shader files by name
    # Where the shader is not one of KINDS: what instantiates it, and its rows of plan.inc.
    lines: list[str] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)
