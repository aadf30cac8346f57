"""`nox` runs everything that a change must pass; `nox -l` lists the sessions.

Each session needs only Python, pip and a C++20 compiler, except those that say what they look for
and skip without it.
"""

import os
import platform
import shutil
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent

nox.needs_version = ">=2024.4"
nox.options.sessions = ["lint", "tests", "asan", "ubsan", "tsan", "neon"]
nox.options.error_on_missing_interpreters = True


def build_tools(session: nox.Session) -> None:
    """What a C++ build of this project takes beyond a compiler."""
    session.install("cmake>=3.25", "ninja>=1.11", "boost-headers==1.85.0.post1")


def build_folder(session: nox.Session) -> Path:
    """A folder that is kept between runs, so that only what changed is compiled again."""
    return Path(session.cache_dir) / f"build-{session.name}"


def jobs() -> str:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return str(count or 1)


def configure_and_build(session: nox.Session, folder: Path, preset: str, *options: str) -> None:
    session.run("cmake", "--preset", preset, "-B", str(folder), *options, silent=True)
    session.run("cmake", "--build", str(folder), "-j", jobs(), silent=True)


@nox.session
def tests(session: nox.Session) -> None:
    """Installs the wheel with its test extra; checks types, runs the C++ tests and pytest.

    mypy looks at the installed package, because the build makes the stub of the compiled module.
    """
    session.install(".[test]", "mypy==2.4.1")
    session.run("mypy")
    folder = build_folder(session)
    python = session.bin + "/python"
    configure_and_build(session, folder, "release", f"-DPython_EXECUTABLE={python}")
    session.run("ctest", "--test-dir", str(folder), "--output-on-failure")
    session.run("pytest", *session.posargs, env={"FLASHATTN_CPP_BUILD_DIR": str(folder)})


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, clang-format and codespell: looks, changes nothing."""
    session.install("ruff==0.17.6", "clang-format==23.1.5", "codespell==2.4.3")
    session.install("tomli; python_version < '3.11'")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell", "--toml", "pyproject.toml")
    session.run("clang-format", "--dry-run", "--Werror", *formatted_sources(), silent=True)


@nox.session(name="format")
def format_sources(session: nox.Session) -> None:
    """Rewrites every source file the way lint wants it."""
    session.install("ruff==0.17.6", "clang-format==23.1.5")
    session.run("ruff", "check", "--fix-only", ".")
    session.run("ruff", "format", ".")
    session.run("clang-format", "-i", *formatted_sources(), silent=True)


def formatted_sources() -> list[str]:
    """Every C++ and Metal source of the project."""
    suffixes = {".h", ".cpp", ".metal", ".cu"}
    folders = ("cpp", "shaders", "tests")
    found = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return sorted(str(path.relative_to(ROOT)) for path in found if path.suffix in suffixes)


def sanitized(session: nox.Session, **environment: str) -> None:
    """Builds the C++ tests with the preset of the session's name and runs them.

    On x86-64 the kernels are built for two instruction sets, which between them take every branch
    of the source: instrumented kernels are slow to compile.
    """
    build_tools(session)
    folder = build_folder(session)
    options = [f"-DPython_EXECUTABLE={session.bin}/python"]
    if platform.machine() in ("x86_64", "AMD64"):
        options.append("-DFLASHATTN_CPU_ISAS=v4_bf16;v3")
    configure_and_build(session, folder, session.name, *options)
    session.run("ctest", "--test-dir", str(folder), "--output-on-failure", env=environment)


@nox.session
def asan(session: nox.Session) -> None:
    """The C++ tests under AddressSanitizer and LeakSanitizer."""
    sanitized(session, ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=1")


@nox.session
def ubsan(session: nox.Session) -> None:
    """The C++ tests under UndefinedBehaviorSanitizer."""
    sanitized(session, UBSAN_OPTIONS="print_stacktrace=1")


@nox.session
def tsan(session: nox.Session) -> None:
    """The C++ tests under ThreadSanitizer."""
    sanitized(session, TSAN_OPTIONS="halt_on_error=1")


@nox.session
def neon(session: nox.Session) -> None:
    """The C++ tests built for aarch64 and run under qemu, where both tools are installed."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    emulator = shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        session.skip(
            "needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu qemu-user)"
        )
    build_tools(session)
    folder = build_folder(session)
    configure_and_build(
        session,
        folder,
        "release",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={compiler}",
        f"-DCMAKE_CROSSCOMPILING_EMULATOR={emulator};-L;/usr/aarch64-linux-gnu",
        f"-DPython_EXECUTABLE={session.bin}/python",
    )
    session.run("ctest", "--test-dir", str(folder), "--output-on-failure")
