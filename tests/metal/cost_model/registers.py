"""Registers a kernel needs, by proxy: the smallest number of 32-bit registers with which ptxas
compiles the translated kernel without putting one in memory.

It says how two versions of a kernel compare. Apple's compiler allocates on its own, keeps what is
the same for a whole simdgroup elsewhere and packs half values; nothing here is a claim about it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path += [
    str(Path(__file__).resolve().parent.parent),
    str(Path(__file__).resolve().parent.parent / "translate"),
]

from build_kernel import find_clang

HERE = Path(__file__).resolve().parent

FLAGS = ["--target=nvptx64-nvidia-cuda", "-Xclang", "-target-cpu", "-Xclang", "sm_90"]
FLAGS += ["-Xclang", "-target-feature", "-Xclang", "+ptx80", "-x", "c++", "-std=c++20", "-O2"]
FLAGS += ["-S", "-ffreestanding", "-nostdinc", "-fno-exceptions", "-fno-rtti", "-fno-vectorize"]
FLAGS += ["-fno-slp-vectorize", "-ffp-contract=fast", "-fno-math-errno", "-Wno-everything"]
FEWEST, MOST = 32, 255

TABLES = re.compile(r'\n# 1 "metal_sim_tables".*', re.DOTALL)
THUNK = re.compile(r"invoke_0\(const abi::Invocation& invocation\) \{ ::(.*?)\((.*)\); \}\n")
POSITION = re.compile(r"invocation\.position->(\w+)")
DEVICE = re.compile(r"metal_sim::(Pointer|Reference)Argument\{invocation\.buffers\[\w+\]\}")
POSITIONS = {
    "threadgroup_position_in_grid": "__nvvm_read_ptx_sreg_ctaid_x()",
    "thread_index_in_threadgroup": "__nvvm_read_ptx_sreg_tid_x()",
    "thread_index_in_simdgroup": "metal::lane_number()",
    "simdgroup_index_in_threadgroup": "__nvvm_read_ptx_sreg_tid_x() / 32",
}


def entry_point(program: str) -> str:
    """A PTX kernel that calls the program's first kernel."""
    match = THUNK.search(program)
    assert match is not None
    function, arguments = match.groups()
    parameters, values = [], []
    for number, argument in enumerate(re.split(r", (?=metal_sim::)", arguments)):
        if found := DEVICE.match(argument):
            # Parameters by value are read where they are used, as from Apple's uniform registers.
            by_value = found.group(1) == "Reference"
            parameters.append(f"{'AttentionParams' if by_value else 'void*'} a{number}")
            values.append(f"a{number}" if by_value else f"Pointer{{a{number}}}")
        else:
            position = POSITION.search(argument)
            assert position is not None
            values.append(POSITIONS[position.group(1)])
    return (
        "struct Pointer { void* p; template <class T> PROXY operator T*() const "
        "{ return (T*)p; } };\n"
        f'extern "C" __attribute__((nvptx_kernel)) void entry({", ".join(parameters)}) '
        f"{{ ::{function}({', '.join(values)}); }}\n"
    )


def to_ptx(program: str, folder: Path) -> Path:
    text = TABLES.sub("", program)
    source, output = folder / "kernel.cpp", folder / "kernel.ptx"
    source.write_text(f"{text}\n{entry_point(program)}")
    command = [*find_clang(""), *FLAGS, f"-I{HERE / 'register_msl'}", str(source)]
    # A shader's helper functions are inlined on the device.
    command += ["-mllvm", "-inline-threshold=1000000", "-o", str(output)]
    subprocess.run(command, check=True)
    return output


def spills(ptx: Path, limit: int) -> bool:
    """Whether ptxas puts a register in memory when it may use `limit`."""
    command = ["ptxas", "-v", "-arch=sm_90", f"-maxrregcount={limit}", str(ptx), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", done.stderr)
    return any(int(number) > 0 for pair in found for number in pair)


def registers(program: str) -> int:
    """The fewest registers without spills; MOST where more would be needed."""
    low, high = FEWEST, MOST
    with tempfile.TemporaryDirectory() as folder:
        ptx = to_ptx(program, Path(folder))
        while low < high:
            middle = (low + high) // 2
            if spills(ptx, middle):
                low = middle + 1
            else:
                high = middle
    return low
