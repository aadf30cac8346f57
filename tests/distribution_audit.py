"""Looks into a wheel or source distribution: `python distribution_audit.py FILE...`, exit 1 on a
finding.

A wheel holds the package's tracked Python files, one module with its stub, the licence and metadata
of the right version, and nothing else; its module needs the system's libraries alone, has no run
path, shows its entry alone, and names no folder of the machine that built it. A source distribution
holds tracked files and PKG-INFO, which unpack into one folder and belong to nobody in particular.
Relies on git for what is tracked, and on binutils' readelf for what a module needs.
test_packaging.py asks the same of the working tree and of what is installed.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
# What manylinux promises to be there, as far as C++ programs of this kind need it.
SYSTEM_LIBRARIES = re.compile(
    r"lib(stdc\+\+|m|gcc_s|c|pthread|dl|rt)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+"
)
# Folders of whoever built it; /usr and the like are everybody's.
MACHINE_PATHS = re.compile(rb"/(?:home|root|tmp|Users|work|build|io|project)/[\w.+-]+[\w./+-]*")
MODULE = re.compile(r"flashattn/_core[.\w-]*\.(so|pyd)")
# Functions that a module may show: its entry, and the C++ library's own templates.
SHOWN = re.compile(r"PyInit__core|_ZNK?(St|9__gnu_cxx).*")
# Permissions that nothing has: another's identity, and writing for everybody.
WRONG_BITS = stat.S_ISUID | stat.S_ISGID | stat.S_IWOTH


def tracked(*more: str) -> set[str]:
    """Paths that git knows, from the root. more: options of git ls-files."""
    command = ("git", "-C", str(ROOT), "ls-files", "--cached", *more)
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return set(listed.splitlines())


def with_new() -> set[str]:
    """Paths that git knows or would take: those of a working tree with new files."""
    return tracked("--others", "--exclude-standard")


def version() -> str:
    found = re.search(
        r"project\(flashattn VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()
    )
    assert found is not None
    return found[1]


def audit_wheel(path: Path, has_stub: bool = True) -> list[str]:
    """What is wrong with a wheel, in words. A cross-compiled one has no stub."""
    with zipfile.ZipFile(path) as archive:
        files = [info for info in archive.infolist() if not info.is_dir()]
        contents = {info.filename: archive.read(info) for info in files}
        modes = {info.filename: info.external_attr >> 16 for info in files}
    info = f"flashattn-{version()}.dist-info"
    findings = content_findings(set(contents), tracked(), has_stub)
    findings += [f"{name} is a link" for name, mode in modes.items() if mode & 0o170000 == 0o120000]
    findings += [f"{name} has mode {mode:o}" for name, mode in modes.items() if mode & WRONG_BITS]
    if f"{info}/RECORD" in contents:
        findings += record_findings(contents, f"{info}/RECORD")
    if f"{info}/METADATA" in contents:
        findings += metadata_findings(contents[f"{info}/METADATA"].decode())
    for name in filter(MODULE.fullmatch, contents):
        findings += module_findings(name, contents[name])
    return findings


def content_findings(names: set[str], known: set[str], has_stub: bool = True) -> list[str]:
    """Files of a wheel that are too many, and those that it lacks."""
    info = f"flashattn-{version()}.dist-info"
    python = {name.removeprefix("python/") for name in known if name.startswith("python/")}
    modules = [name for name in names if MODULE.fullmatch(name)]
    notes = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")}
    wanted = python | notes | {*modules, *(["flashattn/_core.pyi"] if has_stub else [])}
    findings = [f"{name} does not belong in a wheel" for name in sorted(names - wanted)]
    findings += [f"{name} is missing" for name in sorted(wanted - names)]
    if len(modules) != 1:
        findings.append(f"{len(modules)} compiled modules instead of one")
    return findings


def record_findings(contents: dict[str, bytes], record: str) -> list[str]:
    """Files whose hash is not the recorded one."""
    rows = {name: value for name, value, _ in csv.reader(contents[record].decode().splitlines())}
    findings = []
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if name != record and rows.get(name) != f"sha256={digest}":
            findings.append(f"{name} is not what RECORD says")
    return findings


def metadata_findings(text: str) -> list[str]:
    """The version, the licence, and that numpy is all that has to be there."""
    findings = []
    for line in (f"Version: {version()}", "License-Expression: MIT", "Requires-Python: >=3.10"):
        if line not in text.splitlines():
            findings.append(f"METADATA lacks {line!r}")
    needed = re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
    always = [line for line in needed if "extra ==" not in line]
    if [re.split(r"[^\w.-]", line)[0] for line in always] != ["numpy"]:
        findings.append(f"METADATA requires {always} instead of numpy alone")
    return findings


def module_findings(name: str, data: bytes) -> list[str]:
    """What an ELF module needs from other libraries, and what it gives away."""
    findings = [
        f"{name} names {found.decode(errors='replace')}"
        for found in sorted(set(MACHINE_PATHS.findall(data)))
    ]
    if not data.startswith(b"\x7fELF"):
        return findings
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        options = ("--dynamic", "--segments", "--dyn-syms", "--wide")
        listed = subprocess.run(
            ("readelf", *options, file.name), check=True, capture_output=True, text=True
        ).stdout
    for library in re.findall(r"\(NEEDED\).*\[(.*)\]", listed):
        if SYSTEM_LIBRARIES.fullmatch(library) is None:
            findings.append(f"{name} needs {library}")
    findings += [f"{name} has a run path" for _ in re.findall(r"\((?:RPATH|RUNPATH)\)", listed)]
    if re.search(r"\(TEXTREL\)", listed):
        findings.append(f"{name} has text relocations")
    if re.search(r"GNU_STACK.* RW ", listed) is None:
        findings.append(f"{name} has a stack that code can run on")
    shown = re.findall(r"FUNC\s+(?:GLOBAL|WEAK)\s+DEFAULT\s+\d+\s+(\S+)", listed)
    findings += [f"{name} shows {symbol}" for symbol in shown if SHOWN.fullmatch(symbol) is None]
    return findings


def audit_sdist(path: Path, known: set[str]) -> list[str]:
    """What is wrong with a source distribution of the files `known`, in words."""
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    top = f"flashattn-{version()}"
    findings, names = [], set()
    for member in members:
        place = PurePosixPath(member.name)
        if place.parts[0] != top or ".." in place.parts:
            findings.append(f"{place} unpacks outside of {top}")
        elif member.isfile():
            names.add(str(place.relative_to(top)))
        elif not member.isdir():
            findings.append(f"{place} is neither a file nor a folder")
        if member.mode & WRONG_BITS:
            findings.append(f"{place} has mode {member.mode:o}")
        if (member.uid, member.gid) != (0, 0):
            findings.append(f"{place} belongs to {member.uid}:{member.gid}")
    findings += [f"{name} is not tracked" for name in sorted(names - known - {"PKG-INFO"})]
    findings += [f"{name} is missing" for name in sorted(known - names)]
    return findings


def main() -> None:
    """Prints the findings of each file."""
    count = 0
    for argument in sys.argv[1:]:
        path = Path(argument)
        findings = audit_wheel(path) if path.suffix == ".whl" else audit_sdist(path, tracked())
        for finding in findings:
            print(f"{path.name}: {finding}")
        print(f"{path.name}: {len(findings)} findings, {path.stat().st_size / 1e6:.1f} MB")
        count += len(findings)
    sys.exit(count != 0)


if __name__ == "__main__":
    main()
