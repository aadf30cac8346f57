"""Compile and link the whole Python module for macOS on Apple silicon, on any machine.

`cross_build.py --build DIR` shows that every source compiles for aarch64-macos with metal-cpp's own
macOS paths, and that the module refers to no symbol but those of libSystem, libc++, libobjc, Metal,
Foundation and Python. Nothing is run. zig's clang brings the C library headers and libSystem's
names; the other libraries are the text stubs beside this file, and the list of Python's names is
nanobind's own list for macOS.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TARGET = ["-target", "aarch64-macos.14.0"]
FLAGS = [
    "-std=c++20",
    "-O1",
    "-fblocks",
    "-fvisibility=hidden",
    "-fno-sanitize=undefined",
    "-Wall",
    "-Wextra",
]
DEFINITIONS = ["-DFLASHATTN_WITH_METAL=1", "-DNDEBUG"]
NEON = ["-DFLASHATTN_CPU_ISA_NAME=neon", "-DFLASHATTN_HAVE_CPU_ISA_neon=1"]


def project_version() -> str:
    """The version in CMakeLists.txt, which is the only one."""
    match = re.search(
        r"project\(flashattn VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()
    )
    assert match is not None
    return match.group(1)


def python_stub(folder: Path) -> None:
    """A text stub with Python's names, from nanobind's list for Apple's linker."""
    import nanobind

    listed = (Path(nanobind.cmake_dir()) / "darwin-ld-cpython.sym").read_text()
    names = sorted(set(re.findall(r"-U (\S+)", listed)))
    text = (
        "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\n"
        "install-name: '@rpath/libpython3.dylib'\n"
        f"exports:\n  - targets: [ arm64-macos ]\n    symbols: [ {', '.join(names)} ]\n...\n"
    )
    (folder / "libpython3.tbd").write_text(text)


def embedded_shaders(folder: Path) -> Path:
    """The generated C++ file with the shaders' texts."""
    shaders = sorted((ROOT / "shaders").glob("*.metal")) + sorted((ROOT / "shaders").glob("*.h"))
    output = folder / "shader_files.cpp"
    joined = "|".join(str(path) for path in shaders)
    script = ROOT / "cmake" / "embed_shaders.cmake"
    subprocess.run(
        ["cmake", f"-DOUTPUT={output}", f"-DSHADERS={joined}", "-P", str(script)], check=True
    )
    return output


def sources(folder: Path) -> list[Path]:
    """Every source of the module as it is built on a Mac."""
    import nanobind

    nanobind_source = Path(nanobind.include_dir()).parent / "src"
    found = [
        path
        for name in ("core", "cpu", "metal")
        for path in (ROOT / "cpp" / "src" / name).glob("*.cpp")
    ]
    found += (ROOT / "cpp" / "bindings").glob("*.cpp")
    found.append(nanobind_source / "nb_combined.cpp")
    found.append(embedded_shaders(folder))
    return sorted(found)


def include_flags(metal_cpp: Path) -> list[str]:
    """Our own headers, and the foreign ones as system headers without warnings."""
    import nanobind

    flags = [f"-I{ROOT}", f"-I{ROOT / 'cpp' / 'include'}", f"-I{ROOT / 'cpp' / 'src'}"]
    robin_map = Path(nanobind.include_dir()).parent / "ext" / "robin_map" / "include"
    foreign = [metal_cpp, HERE / "include", nanobind.include_dir(), robin_map]
    for path in (*foreign, sysconfig.get_paths()["include"]):
        flags += ["-isystem", str(path)]
    return flags


def compile_one(zig: str, source: Path, folder: Path, includes: list[str]) -> Path:
    output = folder / f"{source.parent.name}_{source.stem}.o"
    foreign = "nanobind" in source.parts or source.name == "metal_cpp.cpp"
    flags = [*FLAGS, *(["-w"] if foreign else []), *DEFINITIONS, *NEON, *includes]
    flags.append(f'-DFLASHATTN_VERSION="{project_version()}"')
    subprocess.run([zig, "c++", *TARGET, *flags, "-c", str(source), "-o", str(output)], check=True)
    return output


def link(zig: str, objects: list[Path], folder: Path) -> Path:
    output = folder / "_core.abi3.so"
    libraries = ["-L", str(HERE), "-L", str(folder), "-lobjc", "-lpython3"]
    frameworks = ["-F", str(HERE / "Frameworks"), "-framework", "Metal", "-framework", "Foundation"]
    command = [
        zig,
        "c++",
        *TARGET,
        "-shared",
        *map(str, objects),
        *libraries,
        *frameworks,
        "-o",
        str(output),
    ]
    subprocess.run(command, check=True)
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--build", type=Path, required=True, help="folder for objects and the linked module"
    )
    arguments = parser.parse_args()
    folder = arguments.build.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT / "cmake"))
    sys.path.insert(0, str(HERE.parent))
    from fetch_metal_cpp import fetch
    from toolchain import zig_executable

    zig = str(zig_executable())
    os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(folder / "zig-cache"))
    python_stub(folder)
    includes = include_flags(fetch(folder))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(
            pool.map(lambda path: compile_one(zig, path, folder, includes), sources(folder))
        )
    module = link(zig, objects, folder)
    magic = module.read_bytes()[:4]
    assert magic == b"\xcf\xfa\xed\xfe", f"{module} is no 64-bit Mach-O file: {magic!r}"
    print(
        f"linked {module} ({module.stat().st_size} bytes) for {TARGET[1]}, {len(objects)} objects"
    )


if __name__ == "__main__":
    main()
