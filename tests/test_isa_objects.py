"""The rules by which CTest judges the object of each instruction set: on listings, on real code."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from isa_objects import faults

GOOD = """\
_ZN9flashattn3cpu6isa_v38kKernelsE D 0 58
_ZN9flashattn3cpu6isa_v3L12decode_chunkERKNS0_11DecodeChunkE t 0 40
.LC0 r 0
memcpy U
logf U
"""


def test_a_clean_object_passes() -> None:
    assert faults(GOOD, "v3") == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("_ZSt3maxIfERKT_S2_S2_ W 0 1a", "weak"),
        ("_ZTVN9flashattn3cpu1XE V 0 8", "weak"),
        ("_ZN9flashattn3cpu6isa_v31xE u 0 4", "unique"),
        ("_ZN9flashattn3cpu6isa_v47forwardEv T 0 10", "global outside"),
        ("helper T 0 10", "global outside"),
        ("_ZNSt6vectorIfSaIfEE6resizeEm U", "calls C++"),
    ],
)
def test_each_fault_is_found(line: str, fault: str) -> None:
    assert [fault in text for text in faults(GOOD + line + "\n", "v3")] == [True]


def test_an_object_without_a_table_is_a_fault() -> None:
    assert faults(GOOD, "v4") != []
    assert faults("", "v3") == ["no flashattn::cpu::isa_v3::kKernels"]


def test_an_inline_standard_function_is_found_in_compiled_code(tmp_path: Path) -> None:
    """What the gate is for, from source to symbol."""
    compiler, nm = shutil.which("c++"), shutil.which("nm")
    if compiler is None or nm is None:
        pytest.skip("needs c++ and nm")
    source = tmp_path / "kernels.cpp"
    table = (
        "namespace flashattn::cpu::isa_v3 { extern const int kKernels; const int kKernels = %s; }\n"
    )

    def faults_of(text: str) -> list[str]:
        source.write_text(text)
        target = tmp_path / "kernels.o"
        subprocess.run([compiler, "-O0", "-c", source, "-o", target], check=True)
        listing = subprocess.run([nm, "-P", target], capture_output=True, text=True, check=True)
        return faults(listing.stdout, "v3")

    assert faults_of(table % "1") == []
    leaking = "#include <algorithm>\n" + table % "1"
    leaking += "static int f(int a) { return std::max(a, 1); } static int (*volatile p)(int) = f;\n"
    assert [fault[:4] for fault in faults_of(leaking)] == ["weak"]
