"""MSL -> CUDA: one shader with its instantiations becomes one .cu unit for the check program.

Stands on the simulated device's translator and changes what CUDA spells differently: threadgroup
arrays are __shared__, functions are __device__, kernels get a __global__ wrapper that registers
itself under its host name and the unit's name. Line markers stay, so the sanitizers name .metal
lines.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "translate"))

from build_kernel import find_clang
from kernels import Instance, Kernel, Parameter
from preprocess import preprocess
from rewrite import Rewriter, symbol
from tokens import Token, TranslationError, join, matching_angle, next_index, tokenize

POSITIONS = {
    "threadgroup_position_in_grid": "blockIdx",
    "threads_per_threadgroup": "blockDim",
    "thread_position_in_threadgroup": "threadIdx",
    "threadgroups_per_grid": "gridDim",
}
INDICES = {
    "thread_index_in_threadgroup": "threadIdx.x",
    "thread_index_in_simdgroup": "(threadIdx.x & 31u)",
    "simdgroup_index_in_threadgroup": "(threadIdx.x >> 5)",
    "simdgroups_per_threadgroup": "(blockDim.x >> 5)",
    "threads_per_simdgroup": "32u",
}
NO_FUNCTION = ("struct", "class", "enum", "union", "namespace", "using", "typedef", "extern")


class CudaRewriter(Rewriter):
    """The same pass with CUDA's spelling. Vectors are classes there and need no help."""

    end_of_declarations = ""

    def array_text(self, kind: str, name: str, dimensions: str, alignment: str) -> str:
        # What MSL promises is the natural alignment; shaders that read through float4 say
        # alignas(16).
        align = f"alignas({alignment}) " if alignment != "1" else ""
        return f"__shared__ {align}{kind} {name}{dimensions};"

    def constant_text(self, kind: str, index: str, name: str) -> str:
        return f"static constexpr {kind} {name} = metal_cuda::function_constant<{kind}>({index});"

    def table_text(self) -> str:
        return "static __device__ const"

    def vector_text(self, type_name: str) -> str:
        return type_name

    def run(self) -> str:
        super().run()
        return mark_device_functions(self.out)


def mark_device_functions(tokens: list[Token]) -> str:
    """Puts __device__ in front of every function defined at file scope."""
    tokens = tokenize(join(tokens))
    out: list[Token] = []
    depth, start = 0, 0
    for token in tokens:
        out.append(token)
        if token.text == "{":
            if depth == 0:
                out[start:] = device_function(out[start:])
            depth += 1
        elif token.text == "}":
            depth -= 1
        if depth == 0 and token.text in (";", "}"):
            start = len(out)
    return join(out)


def device_function(chunk: list[Token]) -> list[Token]:
    """`chunk` ends with the '{' of a definition at file scope."""
    first = next_index(chunk, -1)
    after_header = first
    if chunk[first].text == "template":
        after_header = next_index(chunk, matching_angle(chunk, next_index(chunk, first)))
    texts = [token.text for token in chunk[after_header:]]
    if texts[0] in NO_FUNCTION or "(" not in texts or "=" in texts[: texts.index("(")]:
        return chunk
    head = [token for token in chunk[after_header:] if token.text not in ("inline", "static")]
    return [*chunk[:after_header], symbol("__device__ __forceinline__ "), *head]


def call_argument(parameter: Parameter) -> str:
    if parameter.kind == "position":
        return f"metal_cuda::position({POSITIONS[parameter.index]})"
    if parameter.kind == "index":
        return f"metal_cuda::Index{{{INDICES[parameter.index]}}}"
    if parameter.kind == "threadgroup":
        raise TranslationError("threadgroup arguments have no CUDA translation")
    return parameter.name if parameter.is_reference else f"metal_cuda::Pointer{{{parameter.name}}}"


# Parameters that travel by value, by the slot they are bound to.
REFERENCES = {"kBufferParams": "AttentionParams", "kBufferModifiers": "ModifierParams"}


def wrapper(number: int, instance: Instance, kernel: Kernel) -> str:
    arguments = [p for p in kernel.parameters if p.kind in ("buffer", "constant")]
    types = [REFERENCES[p.index] if p.is_reference else "" for p in arguments]
    signature = [f"{t or 'void*'} {p.name}" for p, t in zip(arguments, types, strict=True)]
    slots = [
        f"{{unsigned({p.index}), {f'sizeof({t})' if t else '0'}}}"
        for p, t in zip(arguments, types, strict=True)
    ]
    call = ", ".join(call_argument(parameter) for parameter in kernel.parameters)
    return (
        f"static __global__ void kernel_{number}({', '.join(signature)}) "
        f"{{ {instance.function}{instance.arguments}({call}); }}\n"
        f'static const metal_cuda::Registration registration_{number}("{instance.host_name}", '
        f"METAL_CUDA_UNIT_NAME, reinterpret_cast<const void*>(&kernel_{number}), "
        f"{{{', '.join(slots)}}});\n"
    )


def translate(
    source: str, file_name: str, includes: list[str], unit: str, settings: dict[str, str]
) -> str:
    """Text of the unit. `settings`: METAL_CUDA_* macros (map, function constants)."""
    rewriter = CudaRewriter(tokenize(preprocess(source, file_name, find_clang(""), includes, [])))
    body = rewriter.run()
    body = re.sub(r'^# (\d+) ("[^"]*").*$', r"#line \1 \2", body, flags=re.M)
    body = re.sub(r'^#line \d+ "<.*$', "", body, flags=re.M)
    body = re.sub(r"#pragma clang loop unroll\(full\)", "#pragma unroll", body)
    body = re.sub(r"#pragma clang loop unroll\(disable\)", "#pragma unroll 1", body)
    text = "".join(f"#define {name} {value}\n" for name, value in settings.items())
    text += f'#define METAL_CUDA_UNIT_NAME "{unit}"\n#include "metal_shim.cuh"\n'
    text += f"namespace {unit} {{\nusing namespace metal;\nMETAL_CUDA_TYPES\n{body}\n"
    text += '#line 1 "wrappers"\n'
    for number, instance in enumerate(rewriter.program.instances):
        kernel = rewriter.program.kernels[instance.function]
        text += wrapper(number, instance, kernel)
    return f"{text}}}\n"
