"""The audit of wheels finds what is planted. (`nox -s wheel` audits real ones.)"""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from distribution_audit import (
    ROOT,
    audit_sdist,
    audit_wheel,
    module_findings,
    tracked,
    version,
)

pytestmark = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs a git checkout"
)
INFO = f"flashattn-{version()}.dist-info"
METADATA = f"Version: {version()}\nLicense-Expression: MIT\nRequires-Python: >=3.10\n"
METADATA += 'Requires-Dist: numpy>=1.23\nRequires-Dist: torch>=2.9; extra == "torch"\n'


def contents() -> dict[str, bytes]:
    """A wheel without a fault, but for a module that is none."""
    names = [name for name in tracked() if name.startswith("python/")]
    files = {name.removeprefix("python/"): (ROOT / name).read_bytes() for name in names}
    files |= {"flashattn/_core.abi3.so": b"no ELF", "flashattn/_core.pyi": b""}
    files |= {f"{INFO}/{name}": b"" for name in ("WHEEL", "licenses/LICENSE")}
    return files | {f"{INFO}/METADATA": METADATA.encode()}


def wheel(folder: Path, files: dict[str, bytes], mode: int = 0o644) -> Path:
    rows = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}")
    path = folder / "flashattn.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (files | {f"{INFO}/RECORD": "\n".join(rows).encode()}).items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o100000 | mode) << 16
            archive.writestr(info, data)
    return path


def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path) -> None:
    assert audit_wheel(wheel(tmp_path, contents())) == []


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"flashattn/__pycache__/x.pyc": b""}, "does not belong in a wheel"),
        ({"include/flashattn/attention.h": b""}, "does not belong in a wheel"),
        ({"flashattn/_core.cp313.so": b""}, "2 compiled modules"),
        ({f"{INFO}/METADATA": METADATA.replace(version(), "9").encode()}, "lacks 'Version"),
        ({f"{INFO}/METADATA": f"{METADATA}Requires-Dist: rich\n".encode()}, "instead of numpy"),
        ({"flashattn/_core.abi3.so": b"\0/home/someone/cpp/src/x.cpp\0"}, "names /home/someone"),
    ],
)
def test_faults_are_found(tmp_path: Path, change: dict[str, bytes], finding: str) -> None:
    found = audit_wheel(wheel(tmp_path, contents() | change))
    assert any(finding in text for text in found), found


def test_permissions_are_looked_at(tmp_path: Path) -> None:
    for mode in (0o666, 0o4755):
        found = audit_wheel(wheel(tmp_path, contents(), mode))
        assert f"flashattn/_api.py has mode {0o100000 | mode:o}" in found


@pytest.mark.parametrize(
    ("name", "change", "finding"),
    [
        ("README.md", {}, ""),
        ("notes.txt", {}, "notes.txt is not tracked"),
        ("README.md", {"mode": 0o666}, "README.md has mode 666"),
        ("README.md", {"uid": 1000}, "README.md belongs to 1000:0"),
        ("README.md", {"type": tarfile.SYMTYPE}, "is neither a file nor a folder"),
        ("../README.md", {}, "unpacks outside of"),
    ],
)
def test_an_sdist_is_looked_at(
    name: str, change: dict[str, Any], finding: str, tmp_path: Path
) -> None:
    path = tmp_path / "flashattn.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file, changes in (("LICENSE", {}), (name, change)):
            member = tarfile.TarInfo(f"flashattn-{version()}/{file}")
            for attribute, value in changes.items():
                setattr(member, attribute, value)
            archive.addfile(member, io.BytesIO())
    found = audit_sdist(path, {"LICENSE", "README.md"})
    assert any(finding in text for text in found) if finding else found == []
    assert "CMakeLists.txt is missing" in audit_sdist(path, {"CMakeLists.txt"})


def test_missing_and_changed_files_are_found(tmp_path: Path) -> None:
    files = contents()
    del files["flashattn/py.typed"]
    assert "flashattn/py.typed is missing" in audit_wheel(wheel(tmp_path, files))
    path = wheel(tmp_path, contents())
    with zipfile.ZipFile(path) as archive:
        stored = {info.filename: archive.read(info) for info in archive.infolist()}
    stored["flashattn/_api.py"] += b"# more\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in stored.items():
            archive.writestr(name, data)
    assert "flashattn/_api.py is not what RECORD says" in audit_wheel(path)


@pytest.mark.skipif(
    shutil.which("readelf") is None or not sys.platform.startswith("linux"), reason="needs readelf"
)
def test_libraries_that_are_not_the_systems_are_found() -> None:
    """Python itself needs libraries that a wheel must not, and shows another entry."""
    import _ctypes

    found = module_findings("x.so", Path(_ctypes.__file__).read_bytes())
    assert any("needs libffi" in text for text in found)
    assert "x.so shows PyInit__ctypes" in found
