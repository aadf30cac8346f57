"""`build_kernel.py --source X.metal --output X.so [...]`: one MSL program to one module for the
simulated device.

The runtime starts it on a cache miss and shows what it prints to stderr as the compile log. --keep
leaves the translated C++ beside the output.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from preprocess import preprocess
from rewrite import Rewriter
from tables import tables
from tokens import TranslationError, tokenize

RUNTIME = Path(__file__).resolve().parent.parent / "runtime"
CHECKER = Path(__file__).resolve().parent.parent / "checker"

# No contraction: the bits of a result must not depend on how the compiler pairs products and sums.
COMPILE = [
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-ffreestanding",
    "-nostdinc",
    "-fno-exceptions",
    "-fno-rtti",
]
COMPILE += ["-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing"]
COMPILE += ["-gline-tables-only", "-gdwarf-4", "-fno-stack-protector", "-Wno-everything"]
COMPILE += ["-Werror=double-promotion", "-Werror=return-type", "-Werror=uninitialized"]

# -fsanitize=thread is used for its instrumentation alone: checker/hooks.cpp is linked instead of a
# sanitizer runtime.
CHECK = ["-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0"]
CHECK += ["-ftrivial-auto-var-init=pattern", "-DMETAL_SIM_CHECK=1"]


def find_clang(given: str) -> list[str]:
    """Command of the compiler: the given one, else zig's clang, else a clang on the path."""
    if given:
        return given.split()
    try:
        import ziglang

        return [str(Path(ziglang.__file__).parent / "zig"), "clang"]
    except ImportError:
        found = shutil.which("clang")
        if found is None:
            raise TranslationError(
                "no clang: pip install ziglang, or set METAL_SIM_COMPILER"
            ) from None
        return [found]


def target_flags(clang: list[str]) -> list[str]:
    """Target and builtin headers; conversions of half need one instruction, or clang calls a
    library function.
    """
    machine = platform.machine()
    flags = [f"--target={machine}-linux-gnu"]
    if machine == "x86_64":
        flags += ["-mf16c", "-mfma"]
    if clang[-1] == "clang" and len(clang) == 2:
        flags += ["-isystem", str(Path(clang[0]).parent / "lib" / "include")]
    else:
        done = subprocess.run(
            [*clang, "-print-resource-dir"], capture_output=True, text=True, check=True
        )
        flags += ["-isystem", os.path.join(done.stdout.strip(), "include")]
    return flags


def linker(clang: list[str]) -> list[str]:
    if len(clang) == 2:
        return [clang[0], "ld.lld", "-shared"]
    return [*clang, "-shared", "-nostdlib"]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TranslationError(done.stderr)


def translate(
    source: str, file_name: str, clang: list[str], includes: list[str], macros: list[str]
) -> str:
    """The C++ text of an MSL program."""
    rewriter = Rewriter(tokenize(preprocess(source, file_name, clang, includes, macros)))
    body = rewriter.run()
    return f'#include "metal_sim.h"\n{body}{tables(rewriter.program)}'


def compile_command(clang: list[str], flags: list[str], source: Path, target: Path) -> list[str]:
    """How a translated program, or a part of every module, is compiled."""
    command = [*clang, *target_flags(clang), *COMPILE, *flags, f"-I{RUNTIME / 'msl'}"]
    return [*command, "-c", str(source), "-o", str(target)]


def shared_object(clang: list[str], source: Path, folder: Path) -> Path:
    """The object of a source that every module holds, compiled once per folder and compiler."""
    command = compile_command(clang, [], source, Path())
    digest = hashlib.sha256("\0".join(command).encode())
    for path in (source, RUNTIME / "kernel_abi.h"):
        digest.update(path.read_bytes())
    target = folder / f"{source.stem}-{digest.hexdigest()[:32]}.o"
    if not target.exists():
        private = target.with_suffix(f".{os.getpid()}.o")
        run(compile_command(clang, [], source, private))
        private.rename(target)
    return target


def build(options: argparse.Namespace) -> None:
    clang = find_clang(options.clang)
    output = Path(options.output)
    source = Path(options.source).read_text()
    text = translate(
        source, options.file_name or options.source, clang, options.include, options.macro
    )
    cpp = output.with_suffix(".cpp")
    cpp.write_text(text)
    target = output.with_suffix(".o")
    run(compile_command(clang, CHECK if options.check else [], cpp, target))
    objects = [target, shared_object(clang, RUNTIME / "msl" / "support.cpp", output.parent)]
    if options.check:
        objects.append(shared_object(clang, CHECKER / "hooks.cpp", output.parent))
    run([*linker(clang), "-o", str(output), *map(str, objects)])
    target.unlink()
    if not options.keep:
        os.remove(cpp)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--file-name", default="", help="name of the source in messages")
    parser.add_argument("--clang", default="")
    parser.add_argument("--check", action="store_true", help="with the hooks of the checker")
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("--macro", action="append", default=[])
    parser.add_argument("--keep", action="store_true")
    try:
        build(parser.parse_args())
    except TranslationError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
