"""Put Apple's metal-cpp headers into a build tree.

`fetch_metal_cpp.py DIR` fills DIR/metal_cpp and prints its path. The headers (Apache-2.0) travel
inside the mlx-metal wheel for macOS on Apple silicon. An installed mlx-metal of the pinned version
is used as it is; otherwise pip downloads the wheel, on any platform, and its hash is checked.
Nothing is ever taken from another version, and nothing of the wheel but the headers is unpacked.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.32.4"
PLATFORM = "macosx_15_0_arm64"
SHA256 = "9f0a3cc26d89724434d9684932fc6f3e4e83669d2a895d858ed2c8a55eb84e8b"
PREFIX = "mlx/include/metal_cpp/"


def installed_headers() -> Path | None:
    """The headers of an installed mlx-metal of the pinned version, or None."""
    try:
        distribution = importlib.metadata.distribution("mlx-metal")
    except importlib.metadata.PackageNotFoundError:
        return None
    headers = Path(str(distribution.locate_file(PREFIX)))
    return headers if distribution.version == VERSION and headers.is_dir() else None


def download_wheel(directory: Path) -> Path:
    """The pinned wheel, downloaded by pip into `directory` and checked against its hash."""
    options = ["--quiet", "--disable-pip-version-check", "--only-binary=:all:", "--no-deps"]
    target = ["--platform", PLATFORM, "--python-version", "3.12", "--dest", str(directory)]
    requirement = f"mlx-metal=={VERSION}"
    # -I: a build front end hides the interpreter's own packages, pip among them, by PYTHONPATH.
    pip = [sys.executable, "-I", "-m", "pip", "download"]
    subprocess.run([*pip, *options, *target, requirement], check=True)
    (wheel,) = directory.glob("mlx_metal-*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(
            f"fetch_metal_cpp: sha256 of {wheel.name} ({digest}) must be the pinned {SHA256}"
        )
    return wheel


def unpack_headers(wheel: Path, destination: Path) -> None:
    """Copy the header tree out of the wheel into `destination`."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(PREFIX) and not name.endswith("/"):
                path = destination / name.removeprefix(PREFIX)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(name))


def fetch(build_directory: Path) -> Path:
    """The directory to put on the include path; downloads only when it is not there yet."""
    headers = installed_headers()
    if headers is not None:
        return headers
    destination = build_directory / "metal_cpp"
    stamp = destination / ".sha256"
    if stamp.is_file() and stamp.read_text() == SHA256:
        return destination
    with tempfile.TemporaryDirectory() as scratch:
        unpack_headers(download_wheel(Path(scratch)), destination)
    stamp.write_text(SHA256)
    return destination


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build_directory", type=Path)
    print(fetch(parser.parse_args().build_directory))
