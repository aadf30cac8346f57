"""The aarch64 wheel, cross-compiled and tested under qemu: `python aarch64_wheel.py FOLDER`.

Needs Debian with g++-aarch64-linux-gnu and qemu-user. Takes an aarch64 Python of the running
version out of Debian's packages and its packages as wheels; all of it is unpacked into FOLDER and
nothing is installed. Exit status 1 where something it needs is not there, with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from distribution_audit import audit_wheel

ROOT = Path(__file__).resolve().parent.parent
PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
DEBIAN = (f"{PYTHON}-minimal", f"lib{PYTHON}-minimal", f"lib{PYTHON}-stdlib", f"lib{PYTHON}-dev")
DEBIAN += ("libc6", "libgcc-s1", "libstdc++6", "libexpat1", "libffi8", "zlib1g", "liblzma5")
DEBIAN += ("libbz2-1.0",)
WHEELS = ("numpy", "ml_dtypes", "pytest", "hypothesis", "pluggy", "iniconfig", "packaging")
WHEELS += ("pygments", "sortedcontainers")
# No test that starts programs: the kernel does not run them in the emulator.
TESTS = ("forward", "backward", "visibility")
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def unpack_python(folder: Path) -> Path:
    """The root of an aarch64 system with little more than Python in it."""
    root, state = folder / "root", folder / "apt"
    if (root / "usr" / "bin" / PYTHON).exists():
        return root
    for path in (root, state / "lists" / "partial", state / "archives" / "partial"):
        path.mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *DEBIAN], check=True, cwd=state / "archives")
    for package in (state / "archives").glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    return root


def build_wheel(folder: Path, root: Path) -> Path:
    """The wheel; scikit-build-core and nanobind take its tags from the environment."""
    include = root / "usr" / "include"
    definitions = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_CXX_COMPILER": COMPILER,
        # FindPython wants one to run the target's Python with; the one it is given is the host's.
        "CMAKE_CROSSCOMPILING_EMULATOR": shutil.which("env"),
        "CMAKE_CXX_FLAGS": f"-isystem{include}",  # Debian's pyconfig.h includes its architecture's
        "Python_INCLUDE_DIR": include / PYTHON,
    }
    soabi = f"cpython-{sys.version_info[0]}{sys.version_info[1]}-aarch64-linux-gnu"
    environment = {
        "CMAKE_ARGS": " ".join(f"-D{name}={value}" for name, value in definitions.items()),
        "SETUPTOOLS_EXT_SUFFIX": f".{soabi}.so",
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
    }
    dist = folder / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(dist)]
    subprocess.run([*command, str(ROOT)], check=True, env=os.environ | environment)
    (wheel,) = dist.glob("*_aarch64.whl")
    return wheel


def make_site(folder: Path, wheel: Path) -> Path:
    """A folder of installed packages, the wheel among them."""
    packages = folder / "packages"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    platforms = [f"--platform=manylinux_{tag}_aarch64" for tag in ("2_28", "2_27", "2_17")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *platforms]
    command += ["--only-binary=:all:", f"--python-version={version}", "-d", str(packages)]
    subprocess.run([*command, *WHEELS], check=True)
    site = folder / "site"
    shutil.rmtree(site, ignore_errors=True)
    for path in (*packages.glob("*.whl"), wheel):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
    return site


def main() -> None:
    """Builds, audits, tests."""
    for tool in (COMPILER, EMULATOR, "apt-get", "dpkg"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is not there")
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    root = unpack_python(folder)
    wheel = build_wheel(folder, root)
    findings = audit_wheel(wheel, has_stub=False)
    if findings:
        sys.exit("\n".join(findings))
    site = make_site(folder, wheel)
    emulated = [EMULATOR, "-L", str(root), str(root / "usr" / "bin" / PYTHON)]
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    tests = [str(ROOT / "tests" / f"test_{name}.py") for name in TESTS]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    for arguments in (["-m", "flashattn", "info"], [*pytest, *sys.argv[2:]]):
        subprocess.run([*emulated, *arguments], check=True, env=environment, cwd=ROOT / "tests")


if __name__ == "__main__":
    main()
