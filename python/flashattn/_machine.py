"""Backends, threads and build facts: what someone asks about an installation."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any, Literal, NamedTuple

import numpy as np

from flashattn import _core


class BackendInfo(NamedTuple):
    """One backend of this build, available on this machine or not."""

    name: str
    device: str
    available: bool
    reason: str
    features: tuple[str, ...]
    default: bool


class CopyStats(NamedTuple):
    """Bytes of arrays a backend used where they are, and bytes it had to copy first."""

    adopted_bytes: int
    copied_bytes: int


def backends() -> list[BackendInfo]:
    """Every backend of this build, in the order in which they are asked.

    `reason` says why a backend is not available. A call takes the first available backend that
    supports it, unless `backend=` or the environment variable FLASHATTN_BACKEND names one. One
    whose `default` is False (a simulated device) is only ever used when named.
    """
    return [BackendInfo(*facts) for facts in _core.backends()]


def copy_stats(reset: bool = False) -> dict[str, CopyStats]:
    """Bytes adopted and copied since the process started or the last reset, for each backend.

    Args:
        reset: start counting anew after reading.
    """
    return {name: CopyStats(*counts) for name, counts in _core.copy_stats(reset).items()}


def get_num_threads() -> int:
    """Threads that one call may use, the calling one included.

    At the start this is FLASHATTN_NUM_THREADS, else the cores that this process may use.
    """
    return _core.get_num_threads()


def set_num_threads(threads: int) -> None:
    """Sets the number of threads of later calls, in the whole process. Results do not depend on it.

    Raises:
        ValueError: fewer than one, or more than the pool allows.
        TypeError: no int.
    """
    if isinstance(threads, bool) or not hasattr(threads, "__index__"):
        raise TypeError(f"set_num_threads: threads ({threads!r}) must be an int")
    number = threads.__index__()
    _core.set_num_threads(max(min(number, 2**31 - 1), 0))


def _cpu_model() -> str:
    """The processor's own name for itself, where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith(("model name", "Hardware")):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def config() -> dict[str, Any]:
    """Versions, build, instruction sets, threads, environment and backends, as plain values."""
    versions = {"flashattn": _core.VERSION, "numpy": np.__version__}
    for name in ("torch", "ml_dtypes", "jax", "mlx.core"):
        module = sys.modules.get(name)
        if module is not None:
            versions[name] = str(getattr(module, "__version__", "?"))
    return {
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "machine": platform.machine(),
        "compiler": _core.COMPILER,
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "isa": _core.active_isa(),
            "isas": _core.supported_isas(),
            "built_isas": _core.built_isas(),
        },
        "threads": get_num_threads(),
        "environment": {
            name: text for name, text in sorted(os.environ.items()) if name.startswith("FLASHATTN_")
        },
        "backends": [info._asdict() for info in backends()],
    }


def show_config(mode: Literal["stdout", "dict"] = "stdout") -> dict[str, Any] | None:
    """Prints what a bug report needs: versions, compiler, instruction set, threads, backends.

    Args:
        mode: "stdout" prints; "dict" returns the same as plain values.

    Raises:
        ValueError: another mode.
    """
    if mode not in ("stdout", "dict"):
        raise ValueError(f'show_config: mode ({mode!r}) must be "stdout" or "dict"')
    facts = config()
    if mode == "dict":
        return facts
    print("\n".join(config_lines(facts)))
    return None


def config_lines(facts: dict[str, Any]) -> list[str]:
    """`config()` as aligned text."""
    cpu = facts["cpu"]
    lines = [
        "versions   " + ", ".join(f"{name} {text}" for name, text in facts["versions"].items()),
        f"python     {facts['python']} on {facts['platform']} ({facts['machine']})",
        f"compiler   {facts['compiler']}",
        f"cpu        {cpu['model']}",
        f"isa        {cpu['isa']} of {', '.join(cpu['isas'])}",
        f"threads    {facts['threads']}",
    ]
    for name, text in facts["environment"].items():
        lines.append(f"env        {name}={text}")
    for backend in facts["backends"]:
        state = ", ".join(backend["features"]) if backend["available"] else backend["reason"]
        lines.append(f"backend    {backend['name']}: {backend['device']}: {state}")
    return lines
