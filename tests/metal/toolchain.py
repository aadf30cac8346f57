"""A clang for the simulated Metal device.

`toolchain.py DIR` writes DIR/bin/{clang,clang++,ar,ranlib} and prints DIR/bin. metal-cpp needs
block syntax and the translated shaders need vector extensions: both want clang. The one pip brings
is zig's (`ziglang`, pinned); the files written here are shell scripts that start it. An installed
clang >= 16 is taken instead when asked for with --system, which the sanitizer builds do: zig brings
no AddressSanitizer runtime.

The scripts translate what zig spells differently: -march=x86-64-vN, and a baseline CPU where gcc
and clang mean one. Zig builds libc++ on its first link; the result stays in ZIG_GLOBAL_CACHE_DIR
(default ~/.cache/flashattn/zig).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ZIGLANG = "ziglang==0.17.1"
OLDEST_CLANG = 16

SCRIPT = """#!/bin/sh
# Starts zig's {tool}; written by tests/metal/toolchain.py.
export ZIG_GLOBAL_CACHE_DIR="${{ZIG_GLOBAL_CACHE_DIR:-{cache}}}"
export ZIG_LOCAL_CACHE_DIR="${{ZIG_LOCAL_CACHE_DIR:-$ZIG_GLOBAL_CACHE_DIR}}"
cpu=-mcpu=baseline
for argument do
  shift
  case "$argument" in
    -march=x86-64*) cpu=; argument=$(printf %s "$argument" | tr - _ | sed 's/^_march/-march/') ;;
    -march=*|-mcpu=*) cpu= ;;
    -target|--target=*) cpu= ;;
    -Wl,--version|-Wl,--dependency-file=*|-Wl,--push-state|-Wl,--pop-state) continue ;;
  esac
  set -- "$@" "$argument"
done
exec "{zig}" {tool} $cpu -fno-sanitize=undefined "$@"
"""

PLAIN_SCRIPT = """#!/bin/sh
# Starts zig's {tool}; written by tests/metal/toolchain.py.
export ZIG_GLOBAL_CACHE_DIR="${{ZIG_GLOBAL_CACHE_DIR:-{cache}}}"
exec "{zig}" {tool} "$@"
"""


def zig_executable() -> Path:
    """The zig binary of the ziglang package; installs the pinned one when there is none."""
    try:
        import ziglang
    except ImportError:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", ZIGLANG], check=True)
        import ziglang
    return Path(ziglang.__file__).parent / "zig"


def has_sanitizers(compiler: str) -> bool:
    """Whether it links a program with AddressSanitizer; Debian packs those apart."""
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler, "-fsanitize=address,undefined", "-x", "c++", "-", "-o", f"{folder}/a"]
        program = "#include <string>\nint main() { return std::string().size() != 0; }"
        linked = subprocess.run(command, input=program, capture_output=True, text=True)
    return linked.returncode == 0


def system_clang() -> Path | None:
    """The newest clang++ on the path that is new enough and has its sanitizers, or None."""
    for version in ("", *(f"-{number}" for number in range(30, OLDEST_CLANG - 1, -1))):
        found = shutil.which(f"clang++{version}")
        if found is None:
            continue
        text = subprocess.run(
            [found, "--version"], capture_output=True, text=True, check=True
        ).stdout
        match = re.search(r"clang version (\d+)", text)
        if match and int(match.group(1)) >= OLDEST_CLANG and has_sanitizers(found):
            return Path(found)
    return None


def write_scripts(directory: Path) -> Path:
    """Write the compiler scripts into directory/bin and return that directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "flashattn" / "zig"
    binaries = directory.absolute() / "bin"
    binaries.mkdir(parents=True, exist_ok=True)
    tools = {"clang": ("cc", SCRIPT), "clang++": ("c++", SCRIPT)}
    tools |= {"ar": ("ar", PLAIN_SCRIPT), "ranlib": ("ranlib", PLAIN_SCRIPT)}
    for name, (tool, script) in tools.items():
        path = binaries / name
        path.write_text(script.format(zig=zig_executable(), tool=tool, cache=cache))
        path.chmod(0o755)
    return binaries


def link_system_clang(directory: Path) -> Path:
    """Write directory/bin/{clang,clang++} that start an installed clang."""
    compiler = system_clang()
    if compiler is None:
        raise SystemExit(f"toolchain: no clang++ >= {OLDEST_CLANG} with sanitizers is installed")
    binaries = directory.absolute() / "bin"
    binaries.mkdir(parents=True, exist_ok=True)
    c_compiler = compiler.with_name(compiler.name.replace("clang++", "clang"))
    for name, target in (("clang", c_compiler), ("clang++", compiler)):
        script = binaries / name
        script.write_text(f'#!/bin/sh\nexec "{target}" "$@"\n')
        script.chmod(0o755)
    return binaries


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--system", action="store_true", help="an installed clang >= 16 instead of zig"
    )
    arguments = parser.parse_args()
    print((link_system_clang if arguments.system else write_scripts)(arguments.directory))
