"""What is shipped, of this working tree and of the installed package, by distribution_audit.py's
rules.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from distribution_audit import (
    ROOT,
    WRONG_BITS,
    audit_sdist,
    content_findings,
    module_findings,
    with_new,
)

fa = pytest.importorskip("flashattn")
MODULE = Path(sys.modules["flashattn._core"].__file__ or "")
IN_GIT = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(),
    reason="compares with what git knows",
)
# What an installer adds to the files of a wheel.
INSTALLERS = ("INSTALLER", "REQUESTED", "direct_url.json")


@IN_GIT
def test_the_source_distribution_is_what_git_knows(tmp_path: Path) -> None:
    """No build output, no local file, nothing that unpacks elsewhere or as somebody else."""
    pytest.importorskip("scikit_build_core")
    code = f"import scikit_build_core.build as b; b.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert audit_sdist(archive, with_new()) == []


@IN_GIT
def test_the_wheel_has_the_package_and_nothing_else() -> None:
    try:
        files = importlib.metadata.files("flashattn")
    except importlib.metadata.PackageNotFoundError:
        files = None
    if files is None:
        pytest.skip("the package is not installed from a wheel")
    names = {str(path) for path in files if path.suffix != ".pyc" and path.name not in INSTALLERS}
    assert content_findings(names, with_new()) == []
    for path in files:
        located = Path(str(path.locate()))
        assert not located.exists() or located.stat().st_mode & WRONG_BITS == 0, path


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("readelf") is None,
    reason="needs readelf and an ELF module",
)
def test_the_module_loads_and_shows_nothing_else() -> None:
    """System libraries by name, no search path that another user could fill, and no function but
    the C++ library's own templates that could take the place of another's.
    """
    if hasattr(sys.modules["flashattn._core"], "set_simulated_metal"):
        pytest.skip("the simulated device exports hooks for tests")
    assert module_findings(MODULE.name, MODULE.read_bytes()) == []
