"""A kernel that counts the instructions it executes: the translated program is optimised to LLVM
IR, every basic block of the kernel's own code is given a counter, and the counters are multiplied
by what stands in the block.

Operations of a simdgroup (matrix products, loads and stores, shuffles, votes, barriers) are calls
here and are counted by the simulator's own counters, as are memory accesses. Function constants are
compile-time values, as on the device. The optimiser is LLVM's, like that of Apple's compiler, but
without a GPU's cost model: the counts are an estimate.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path += [
    str(Path(__file__).resolve().parent.parent),
    str(Path(__file__).resolve().parent.parent / "translate"),
]

from build_kernel import RUNTIME, find_clang, linker, run, target_flags, translate
from simulator import SHADERS, cache_folder

FLAGS = ["-std=c++20", "-O2", "-fPIC", "-ffreestanding", "-nostdinc", "-fno-exceptions"]
FLAGS += ["-fno-rtti", "-fvisibility=hidden", "-fno-vectorize", "-fno-slp-vectorize"]
FLAGS += ["-ffp-contract=fast", "-fno-math-errno", "-fno-strict-aliasing", "-fno-stack-protector"]
FLAGS += ["-Wno-everything", "-DMETAL_SIM_COUNT=1"]

# LLVM's opcodes by class. A class is what costs alike on the modelled core (model.py). A comparison
# is part of the select or branch that uses it, and half converts to float inside an instruction.
FLOAT = ("fadd", "fsub", "fmul", "fneg")
INTEGER = ("add", "sub", "and", "or", "xor")
DIVIDE = ("udiv", "urem", "sdiv", "srem")
CONVERT = ("fptoui", "uitofp", "sitofp", "fptosi")
MINMAX_FLOAT = re.compile(r"llvm\.(fma|fmuladd|minnum|maxnum|minimum|maximum)")
MINMAX_INTEGER = re.compile(r"llvm\.(u|s)(min|max)")
# Functions that are not the kernel's code.
FOREIGN = re.compile(r"@_ZNK?5metal|@_ZNK?9metal_sim|@_ZN9metal_simL|@metal_sim_|@mem|@__")


def classify(line: str) -> tuple[str, int] | None:
    """Class and number of machine instructions of one IR instruction; None for what costs none."""
    match = re.match(r"\s*(?:%[\w.$-]+ = )?(?:tail |musttail |notail )?(\w+)", line)
    if match is None:
        return None
    op = match.group(1)
    operands = line[match.end() :].split(", !")[0]
    vector = re.search(r"<(\d+) x", operands)
    count = int(vector.group(1)) if vector else 1
    wide = re.search(r"\bi64\b", operands.split(",")[0]) is not None
    boolean = re.search(r"\bi1\b", operands.split(",")[0]) is not None
    if op in FLOAT:
        return "float", count
    if op == "fdiv":
        return "special", count
    if op == "select":
        return "select", count
    if op in INTEGER:
        return None if boolean else ("integer64" if wide else "integer", count)
    if op == "mul":
        return "multiply64" if wide else "multiply", count
    if op in ("shl", "lshr", "ashr"):
        return "integer64" if wide else ("shift_left" if op == "shl" else "shift_right"), count
    if op in DIVIDE:
        return "divide", count
    if op in CONVERT:
        return "convert", count
    if op == "br":
        return ("branch", 1) if "i1 " in operands else None
    if op == "getelementptr":
        return ("address", 1) if "%" in operands.partition("%")[2] else None
    if op == "call":
        if MINMAX_FLOAT.search(operands):
            return "float", count
        if MINMAX_INTEGER.search(operands):
            return "integer", count
    return None


@dataclass(frozen=True)
class Counted:
    """A module with counters, and what each of its blocks holds."""

    path: Path
    blocks: list[Counter[str]]

    def counters(self) -> list[int]:
        array = (ctypes.c_uint64 * len(self.blocks)).in_dll(
            ctypes.CDLL(str(self.path)), "metal_sim_block_counts"
        )
        return list(array)

    def executed(self, before: list[int], after: list[int]) -> Counter[str]:
        """Instructions by class between two readings, summed over all lanes."""
        total: Counter[str] = Counter()
        for block, old, new in zip(self.blocks, before, after, strict=True):
            for name, count in block.items():
                total[name] += count * (new - old)
        return total


def with_counters(ir: str) -> tuple[str, list[Counter[str]]]:
    """The IR with a call at the start of every block of the kernel's code, and the blocks."""
    out: list[str] = []
    blocks: list[Counter[str]] = []
    inside, pending = False, False
    for line in ir.splitlines():
        if line.startswith("define "):
            inside = pending = FOREIGN.search(line) is None
            if inside:
                blocks.append(Counter())
        elif inside and line.startswith("}"):
            inside = False
        elif inside and re.match(r'([\w.$-]+|"[^"]*"):', line):
            blocks.append(Counter())
            pending = True
        elif inside and line.strip():
            if pending and " = phi " not in line:
                out.append(f"  call void @metal_sim_count_block(i32 {len(blocks) - 1})")
                pending = False
            if found := classify(line):
                blocks[-1][found[0]] += found[1]
        out.append(line)
    return "\n".join([*out, "declare void @metal_sim_count_block(i32)", ""]), blocks


def fixed_constants(constants: Mapping[int, bool]) -> str:
    """C++ that makes each function constant a compile-time value."""
    return "".join(
        f"template <> struct metal_sim::FunctionConstant<bool, {index}> "
        f"{{ constexpr operator bool() const {{ return {str(bool(value)).lower()}; }} }};\n"
        for index, value in constants.items()
    )


def program(shader: Path, instantiation: str, constants: Mapping[int, bool]) -> str:
    """The translated program with its function constants fixed."""
    source = f'{shader.read_text()}\n#line 1 "instantiations"\n{instantiation}\n'
    includes = [str(shader.parent), str(SHADERS)]
    text = translate(source, shader.name, find_clang(""), includes, [])
    head, _, rest = text.partition("\n")
    return f"{head}\n{fixed_constants(constants)}{rest}"


def build(text: str) -> Counted:
    """Compiles a program to a module with counters; kept in the simulator's cache."""
    here = Path(__file__).read_bytes()
    headers = b"".join(p.read_bytes() for p in sorted((RUNTIME / "msl").glob("*.h")))
    key = hashlib.sha256(text.encode() + here + headers).hexdigest()[:24]
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"counted-{key}"
    path, ir_path = stem.with_suffix(".so"), stem.with_suffix(".ll")
    clang = find_clang("")
    flags = [*target_flags(clang), *FLAGS, f"-I{RUNTIME / 'msl'}"]
    if not ir_path.exists():
        cpp = stem.with_suffix(".cpp")
        cpp.write_text(text)
        private = stem.with_suffix(".tmp.ll")
        run([*clang, *flags, "-S", "-emit-llvm", str(cpp), "-o", str(private)])
        private.rename(ir_path)
        cpp.unlink()
    counted, blocks = with_counters(ir_path.read_text())
    if not path.exists():
        link(stem, counted, len(blocks), flags, clang)
    return Counted(path, blocks)


def link(stem: Path, ir: str, count: int, flags: list[str], clang: list[str]) -> None:
    counters = stem.with_suffix(".counters.cpp")
    counters.write_text(
        f'extern "C" __attribute__((visibility("default"))) unsigned long '
        f"metal_sim_block_counts[{count}];\nunsigned long metal_sim_block_counts[{count}];\n"
        'extern "C" void metal_sim_count_block(unsigned n) { ++metal_sim_block_counts[n]; }\n'
    )
    changed = stem.with_suffix(".counted.ll")
    changed.write_text(ir)
    objects = []
    for source in (changed, counters, RUNTIME / "msl" / "support.cpp"):
        target = stem.with_suffix(f".{source.stem}.o")
        options = flags if source.suffix == ".cpp" else [*target_flags(clang)[:1], "-O1", "-fPIC"]
        if source.suffix == ".ll":
            options += ["-mf16c", "-mfma"] if "x86_64" in options[0] else []
        run([*clang, *options, "-Wno-everything", "-c", str(source), "-o", str(target)])
        objects.append(target)
    private = stem.with_suffix(".tmp.so")
    run([*linker(clang), "-o", str(private), *map(str, objects)])
    private.rename(stem.with_suffix(".so"))
    for path in (changed, counters, *objects):
        path.unlink()
