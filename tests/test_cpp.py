"""The C++ side, built and run as its users and developers do: the test binary and the example.

FLASHATTN_CPP_BUILD_DIR names a finished build (nox sets it); without it one is made in a temporary
folder. It takes cmake, ninja and the boost-headers wheel, all in the `test` extra, and a
C++ compiler.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.slow


# cmake and ninja from the environment that runs the tests, also when that one is not activated.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def run(*command: str | Path, **variables: str) -> str:
    """Runs a command with more environment variables and returns its output; a failure shows it."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, "PATH": PATH, **variables},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def build_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished build of the library and the test binary."""
    if shutil.which("cmake", path=PATH) is None or shutil.which("ninja", path=PATH) is None:
        pytest.skip("cmake and ninja are not installed")
    named = os.environ.get("FLASHATTN_CPP_BUILD_DIR")
    if named:
        return Path(named)
    folder = tmp_path_factory.mktemp("cpp")
    run(
        *("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja"),
        *("-DCMAKE_BUILD_TYPE=Release", "-DFLASHATTN_BUILD_TESTS=ON"),
        f"-DPython_EXECUTABLE={sys.executable}",
    )
    run("cmake", "--build", folder)
    return folder


def test_the_cpp_test_binary_passes(build_dir: Path) -> None:
    listed = run("ctest", "--test-dir", build_dir, "--output-on-failure")
    assert re.search(r"100% tests passed.* out of [1-9]", listed), listed


def test_an_installed_package_serves_another_project(build_dir: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    run("cmake", "--install", build_dir, "--prefix", prefix, "--component", "dev")
    # The copy lies outside the source tree, so that only the installed headers can be found.
    source = shutil.copytree(ROOT / "cpp" / "examples", tmp_path / "example")
    build = tmp_path / "build"
    run(
        *("cmake", "-S", source, "-B", build, "-G", "Ninja"),
        *(f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror"),
    )
    run("cmake", "--build", build)
    lines = run(build / "attention_example", FLASHATTN_BACKEND="cpu").splitlines()
    assert lines[1:] == [
        "out: 1.5000 2.0000",
        "lse: 1.3863 1.6094",
        "dv: 0.4500 0.2000",
    ]
