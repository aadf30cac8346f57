"""Runs `clang -E` over an MSL program. Line markers stay: all later messages carry .metal lines."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tokens import TranslationError

STDLIB = Path(__file__).resolve().parent.parent / "runtime" / "msl" / "stdlib"

PREDEFINED = ["-D__METAL_VERSION__=310", "-D__METAL_MACOS__=1", "-D__METAL__=1"]


def preprocess(
    source: str, file_name: str, clang: list[str], includes: list[str], macros: list[str]
) -> str:
    """The program with macros and includes expanded. `macros` are NAME or NAME=VALUE."""
    command = [*clang, "-E", "-x", "c++", "-std=c++17", "-nostdinc", *PREDEFINED]
    command += [f"-I{folder}" for folder in [*includes, str(STDLIB)]]
    command += [f"-D{macro}" for macro in macros]
    marked = f'# 1 "{file_name}"\n{source}'
    done = subprocess.run(
        [*command, "-"], input=marked, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise TranslationError(done.stderr)
    return done.stdout
