"""What is shipped: the files of the source distribution and of the installed wheel, and what the
compiled module asks of the system and shows to it.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

import pytest

fa = pytest.importorskip("flashattn")
ROOT = Path(__file__).resolve().parent.parent
MODULE = Path(sys.modules["flashattn._core"].__file__ or "")
ON_ELF = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("readelf") is None,
    reason="needs readelf and an ELF module",
)


def _run(*command: str | Path) -> str:
    done = subprocess.run(list(command), capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares with what git knows")
def test_the_source_distribution_is_what_git_knows(tmp_path: Path) -> None:
    """No build output, no local file, nothing that unpacks elsewhere or as somebody else."""
    pytest.importorskip("scikit_build_core")
    code = f"import scikit_build_core.build as b; b.build_sdist({str(tmp_path)!r})"
    _run(sys.executable, "-c", code)
    (archive,) = tmp_path.glob("*.tar.gz")
    known = set(_run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines())
    top = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            assert path.parts[0] == top, path
            assert ".." not in path.parts, path
            assert member.isfile() or member.isdir(), path
            assert member.mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IWOTH) == 0, path
            assert (member.uid, member.gid) == (0, 0), path
            if member.isfile():
                assert str(path.relative_to(top)) in known | {"PKG-INFO"}, path
        names = {str(PurePosixPath(name).relative_to(top)) for name in tar.getnames()}
    for needed in ("CMakeLists.txt", "LICENSE", "shaders/forward.metal", "cpp/src/cpu/kernels.cpp"):
        assert needed in names


def test_the_wheel_has_the_package_and_nothing_else() -> None:
    try:
        files = importlib.metadata.files("flashattn")
    except importlib.metadata.PackageNotFoundError:
        files = None
    if files is None:
        pytest.skip("the package is not installed from a wheel")
    allowed = re.compile(
        r"flashattn/([\w/]+\.py|py\.typed|_core\.pyi|_core\.[\w.-]+\.(so|pyd))"
        r"|flashattn-[\w.]+\.dist-info/.*|.*\.pyc"
    )
    strange = [str(path) for path in files if not allowed.fullmatch(str(path))]
    assert not strange
    kinds = {path.suffix for path in files}
    assert {".py", ".pyi", ".typed", ".so"} <= kinds or sys.platform == "win32"
    for path in files:
        mode = Path(str(path.locate())).stat().st_mode if path.locate().exists() else 0
        assert mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IWOTH) == 0, path


def _is_simulated() -> bool:
    return hasattr(sys.modules["flashattn._core"], "set_simulated_metal")


@ON_ELF
def test_the_module_loads_nothing_from_elsewhere() -> None:
    """System libraries alone, by name: no search path that another user could fill."""
    dynamic = _run("readelf", "-dW", MODULE)
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    system = r"lib(c|m|pthread|dl|rt|gcc_s|stdc\+\+)\.so\.\d+|ld-linux.*"
    if not _is_simulated():
        assert all(re.fullmatch(system, name) for name in needed), needed
    stack = re.search(r"GNU_STACK.*", _run("readelf", "-lW", MODULE))
    assert stack is not None
    assert " RWE " not in stack[0]


@ON_ELF
def test_the_module_shows_its_entry_alone() -> None:
    """No function but the C++ library's own templates can take the place of another's."""
    if _is_simulated():
        pytest.skip("the simulated device exports hooks for tests")
    symbols = _run("readelf", "--dyn-syms", "-W", MODULE)
    found = re.findall(r"FUNC\s+(?:GLOBAL|WEAK)\s+DEFAULT\s+\d+\s+(\S+)", symbols)
    own = [name for name in found if not re.match(r"_ZNK?(St|9__gnu_cxx)", name)]
    assert own == ["PyInit__core"]
