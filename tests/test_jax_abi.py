"""Our declaration of XLA's FFI structs (cpp/bindings/xla_abi.h) against the header of the jaxlib
that is installed: sizes, offsets and numbers, checked by a compiler.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")

HEADER = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
# The name of one struct has changed, its layout has not.
EXTENSIONS = ("XLA_FFI_InternalExtension", "XLA_FFI_Extension_Base")
EXTENSION = next(name for name in EXTENSIONS if name in HEADER.read_text())
BINDINGS = Path(__file__).resolve().parent.parent / "cpp" / "bindings"
# ours: (theirs, {field of ours: field of theirs}). Structs that XLA embeds by value must be exactly
# as long as ours; of the others it may know more fields than we do.
STRUCTS = {
    "Extension": (EXTENSION, {"kind": "type", "next": "next"}),
    "Version": (
        "XLA_FFI_Api_Version",
        {"extensions": "extension_start", "major": "major_version", "minor": "minor_version"},
    ),
    "ErrorArguments": ("XLA_FFI_Error_Create_Args", {"message": "message", "code": "errc"}),
    "Api": (
        "XLA_FFI_Api",
        {
            "version": "api_version",
            "internal": "internal_api",
            "create_error": "XLA_FFI_Error_Create",
        },
    ),
    "Buffer": (
        "XLA_FFI_Buffer",
        {"type": "dtype", "data": "data", "rank": "rank", "sizes": "dims"},
    ),
    "Text": ("XLA_FFI_ByteSpan", {"data": "ptr", "size": "len"}),
    "Scalar": ("XLA_FFI_Scalar", {"type": "dtype", "value": "value"}),
    "Values": ("XLA_FFI_Args", {"count": "size", "kinds": "types", "values": "args"}),
    "Values ": ("XLA_FFI_Rets", {"count": "size", "kinds": "types", "values": "rets"}),
    "Attributes": (
        "XLA_FFI_Attrs",
        {"count": "size", "kinds": "types", "names": "names", "values": "attrs"},
    ),
    "CallFrame": (
        "XLA_FFI_CallFrame",
        {
            "extensions": "extension_start",
            "api": "api",
            "context": "ctx",
            "stage": "stage",
            "operands": "args",
            "results": "rets",
            "attributes": "attrs",
            "future": "future",
        },
    ),
    "Metadata": ("XLA_FFI_Metadata", {"version": "api_version", "traits": "traits"}),
    "MetadataExtension": (
        "XLA_FFI_Metadata_Extension",
        {"base": "extension_base", "metadata": "metadata"},
    ),
}
MAY_GROW = {"Api", "Metadata", "CallFrame"}
NUMBERS = {
    "ElementType::kBool": "XLA_FFI_DataType_PRED",
    "ElementType::kInt32": "XLA_FFI_DataType_S32",
    "ElementType::kInt64": "XLA_FFI_DataType_S64",
    "ElementType::kUInt32": "XLA_FFI_DataType_U32",
    "ElementType::kFloat16": "XLA_FFI_DataType_F16",
    "ElementType::kFloat32": "XLA_FFI_DataType_F32",
    "ElementType::kFloat64": "XLA_FFI_DataType_F64",
    "ElementType::kBFloat16": "XLA_FFI_DataType_BF16",
    "ErrorCode::kInvalidArgument": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "ErrorCode::kResourceExhausted": "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED",
    "ErrorCode::kUnimplemented": "XLA_FFI_Error_Code_UNIMPLEMENTED",
    "ErrorCode::kInternal": "XLA_FFI_Error_Code_INTERNAL",
    "ExtensionKind::kMetadata": "XLA_FFI_Extension_Metadata",
    "Stage::kExecute": "XLA_FFI_ExecutionStage_EXECUTE",
    "ValueKind::kBuffer": "XLA_FFI_ArgType_BUFFER",
    "AttributeKind::kScalar": "XLA_FFI_AttrType_SCALAR",
    "AttributeKind::kText": "XLA_FFI_AttrType_STRING",
}


def assertions() -> list[str]:
    lines = ["static_assert(ours::kMajorVersion == XLA_FFI_API_MAJOR);"]
    lines.append("static_assert(ours::kOldestMinorVersion <= XLA_FFI_API_MINOR);")
    for name, (theirs, fields) in STRUCTS.items():
        our = f"ours::{name.strip()}"
        relation = "<=" if name in MAY_GROW else "=="
        lines.append(f"static_assert(sizeof({our}) {relation} sizeof({theirs}));")
        for one, other in fields.items():
            lines.append(f"static_assert(offsetof({our}, {one}) == offsetof({theirs}, {other}));")
            size = f"sizeof({our}::{one}) {relation} sizeof({theirs}::{other})"
            lines.append(f"static_assert({size});")
    lines += [f"static_assert(int(ours::{a}) == int({b}));" for a, b in NUMBERS.items()]
    lines.append(
        "static_assert(XLA_FFI_Error_Create_Args_STRUCT_SIZE == "
        "offsetof(ours::ErrorArguments, code) + sizeof(ours::ErrorCode));"
    )
    return lines


def compiled(lines: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = folder / "abi.cpp"
    head = ['#include "xla_abi.h"', '#include "xla/ffi/api/c_api.h"', "#include <cstddef>"]
    source.write_text("\n".join([*head, "namespace ours = flashattn::xla;", *lines, ""]))
    include = [f"-I{BINDINGS}", "-isystem", jax.ffi.include_dir()]
    command = [compiler, "-std=c++20", "-fsyntax-only", *include, str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_our_structs_are_the_installed_ones(tmp_path: Path) -> None:
    done = compiled(assertions(), tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_wrong_offset_is_noticed(tmp_path: Path) -> None:
    ours, theirs = "offsetof(ours::CallFrame, results)", "offsetof(XLA_FFI_CallFrame, args)"
    wrong = f"static_assert({ours} == {theirs});"
    assert "static assertion" in compiled([wrong], tmp_path).stderr
