"""Kernels of the simulated Metal device from Python: compile MSL, bind numpy arrays, dispatch, read
reports.

    from simulator import Simulator
    sim = Simulator(map="apple", schedule="random", seed=3)  # METAL_SIM_* settings, lower case
    library = sim.compile_file("shaders/forward.metal", append="FLASHATTN_INSTANTIATE(...)")
    kernel = library.kernel("f", {0: True, 3: np.float32(0.5)})       # function constants by index
    run = kernel(threadgroups=(4, 1, 1), threads=(128, 1, 1), buffers=[q, k, v, out, params])
    assert not run.reports, run.reports

Arrays are used in place; a bytes object is a copy, as with setBytes. The library libmetal_sim.so is
built with CMake on first use, into the cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

METAL = Path(__file__).resolve().parent
SHADERS = METAL.parent.parent / "shaders"


class SimulatorError(Exception):
    """Compilation or the request failed; the text is the log."""


@dataclass(frozen=True)
class Run:
    """Result of one dispatch."""

    reports: list[str]
    counters: dict[str, int]


def cache_folder() -> Path:
    given = os.environ.get("METAL_SIM_CACHE")
    home = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    return Path(given) if given else Path(home) / "metal-sim"


def build_runtime() -> Path:
    """Path of libmetal_sim.so for the sources as they are now."""
    digest = hashlib.sha256()
    sources = [p for part in ("runtime", "checker") for p in sorted((METAL / part).iterdir())]
    for path in sources:
        if path.suffix in (".cpp", ".h", ".S", ".txt"):
            digest.update(path.read_bytes())
    digest.update(str(METAL).encode())
    build = cache_folder() / f"runtime-{digest.hexdigest()[:16]}"
    library = build / "libmetal_sim.so"
    if not library.exists():
        private = build.with_name(f"{build.name}.{os.getpid()}")
        configure = [
            "cmake",
            "-S",
            str(METAL / "runtime"),
            "-B",
            str(private),
            "-DCMAKE_BUILD_TYPE=Release",
        ]
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
        make = ["cmake", "--build", str(private), "--target", "metal_sim_shared", "-j2"]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        build.mkdir(parents=True, exist_ok=True)
        (private / library.name).rename(library)
    return library


def _strings(items: Sequence[str]) -> Any:
    return (ctypes.c_char_p * (len(items) + 1))(*[item.encode() for item in items], None)


def _triple(values: Sequence[int] | None) -> Any:
    return None if values is None else (ctypes.c_uint32 * 3)(*values)


def _bits(value: Any) -> int:
    """Object representation of a function constant. Python's bool, int and float are bool, int and
    float.
    """
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        value = np.int32(value) if value < 0 else np.uint32(value)
    if isinstance(value, float):
        value = np.float32(value)
    return int.from_bytes(value.tobytes(), "little")


class Simulator:
    """The loaded runtime. Settings belong to the process, not to the object."""

    def __init__(self, **settings: Any) -> None:
        os.environ.setdefault("METAL_SIM_PYTHON", sys.executable)
        self.lib = ctypes.CDLL(str(build_runtime()))
        for name in ("error", "function_names", "report", "counters"):
            getattr(self.lib, f"metal_sim_{name}").restype = ctypes.c_char_p
        for name in ("compile", "load", "kernel"):
            getattr(self.lib, f"metal_sim_{name}").restype = ctypes.c_void_p
        self.lib.metal_sim_static_threadgroup_bytes.restype = ctypes.c_size_t
        self.lib.metal_sim_max_threads.restype = ctypes.c_uint32
        self.set(**settings)

    def fail(self) -> SimulatorError:
        return SimulatorError(self.lib.metal_sim_error().decode())

    def set(self, **settings: Any) -> None:
        for name, value in settings.items():
            text = str(int(value)) if isinstance(value, bool) else str(value)
            if self.lib.metal_sim_set(name.encode(), text.encode()) != 0:
                raise self.fail()

    def compile(
        self,
        source: str,
        file_name: str = "program.metal",
        includes: Sequence[str] = (),
        macros: Sequence[str] = (),
    ) -> Library:
        handle = self.lib.metal_sim_compile(
            source.encode(), file_name.encode(), _strings(includes), _strings(macros)
        )
        if handle is None:
            raise self.fail()
        return Library(self, handle)

    def load(self, module: str | Path) -> Library:
        """A kernel module that was built elsewhere, without the checker's hooks."""
        handle = self.lib.metal_sim_load(str(module).encode())
        if handle is None:
            raise self.fail()
        return Library(self, handle)

    def compile_file(
        self, path: str | Path, append: str = "", macros: Sequence[str] = ()
    ) -> Library:
        """A .metal file with lines appended (instantiations); includes are searched beside it and
        in shaders/.
        """
        path = Path(path)
        source = f'{path.read_text()}\n#line 1 "instantiations"\n{append}\n'
        return self.compile(source, path.name, [str(path.parent), str(SHADERS)], macros)


class Library:
    def __init__(self, simulator: Simulator, handle: int) -> None:
        self.simulator = simulator
        self.handle = ctypes.c_void_p(handle)

    def function_names(self) -> list[str]:
        return self.simulator.lib.metal_sim_function_names(self.handle).decode().split()

    def kernel(self, name: str, constants: Mapping[int, Any] | None = None) -> Kernel:
        items = sorted((constants or {}).items())
        indices = (ctypes.c_uint32 * (len(items) + 1))(*[index for index, _ in items])
        values = (ctypes.c_uint64 * (len(items) + 1))(*[_bits(value) for _, value in items])
        lib = self.simulator.lib
        handle = lib.metal_sim_kernel(self.handle, name.encode(), len(items), indices, values)
        if handle is None:
            raise self.simulator.fail()
        return Kernel(self.simulator, handle)


class Kernel:
    def __init__(self, simulator: Simulator, handle: int) -> None:
        self.simulator = simulator
        self.handle = ctypes.c_void_p(handle)

    @property
    def static_threadgroup_bytes(self) -> int:
        return self.simulator.lib.metal_sim_static_threadgroup_bytes(self.handle)

    @property
    def max_threads(self) -> int:
        return self.simulator.lib.metal_sim_max_threads(self.handle)

    def __call__(
        self,
        threadgroups: Sequence[int],
        threads: Sequence[int],
        buffers: Sequence[np.ndarray | bytes | None],
        threadgroup_bytes: Sequence[int] = (),
        grid_threads: Sequence[int] | None = None,
    ) -> Run:
        """buffers: by buffer index; None leaves an index unbound."""
        copies = [
            np.frombuffer(bytearray(b), np.uint8) if isinstance(b, bytes) else b for b in buffers
        ]
        pointers = (ctypes.c_void_p * (len(copies) + 1))(
            *[None if b is None else b.ctypes.data for b in copies]
        )
        lengths = (ctypes.c_size_t * (len(copies) + 1))(
            *[0 if b is None else b.nbytes for b in copies]
        )
        memory = (ctypes.c_size_t * (len(threadgroup_bytes) + 1))(*threadgroup_bytes)
        lib = self.simulator.lib
        count = lib.metal_sim_dispatch(
            self.handle, _triple(threadgroups), _triple(threads), _triple(grid_threads),
            len(copies), pointers, lengths, len(threadgroup_bytes), memory,
        )  # fmt: skip
        if count < 0:
            raise self.simulator.fail()
        reports = [lib.metal_sim_report(i).decode() for i in range(count)]
        lines = lib.metal_sim_counters().decode().splitlines()
        return Run(
            reports, {name: int(value) for name, value in (line.split("=") for line in lines)}
        )
