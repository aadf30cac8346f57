"""The shaders keep to what Apple's compiler takes: C++14 with `if constexpr`, and none of the
constructs that Metal forbids or that production kernels avoid (docs/msl.md). Our clang would take
more.
"""

from __future__ import annotations

import re
import subprocess

import pytest
from build_kernel import COMPILE, RUNTIME, target_flags, translate
from kernels import Program
from register_cases import REGISTER_KERNELS, fitting, merge_launch, probe_launch
from rewrite import Rewriter
from shader_cases import KERNELS, OPTION_KERNELS, Case, Launch, staged
from simulator import SHADERS, Simulator, SimulatorError
from tokens import tokenize

# Words that Metal refuses, or that spill or slow kernels down.
FORBIDDEN = {
    *("double", "goto", "virtual", "new", "delete", "try", "catch", "throw", "typeid"),
    *("dynamic_cast", "static", "thread_local", "volatile", "asm", "mutable", "operator"),
}
EXTENSIONS = ["-Wc++17-extensions", "-Wc++20-extensions", "-Wc++23-extensions"]


def extension_warnings(source: str, name: str, clang: list[str]) -> list[str]:
    """What clang calls newer than C++14, `if constexpr` aside."""
    program = translate(source, name, clang, [str(SHADERS)], [])
    flags = [flag for flag in COMPILE if not flag.startswith(("-std", "-W"))]
    command = [*clang, *target_flags(clang), *flags, "-std=c++14", *EXTENSIONS, "-fsyntax-only"]
    # As system headers, ours may use what they like.
    command += ["-isystem", str(RUNTIME / "msl"), "-x", "c++", "-"]
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stderr.splitlines() if "warning:" in line]
    return [line for line in found if "constexpr if" not in line]


LAUNCHES = {
    **{kernel: staged(Case(), kernel) for kernel in [*KERNELS, *OPTION_KERNELS]},
    **{f"register {kernel}": fitting(kernel, Case()).launch() for kernel in REGISTER_KERNELS},
    "merge chunks": merge_launch("float32"),
    "lane map probe": probe_launch(),
}


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_shaders_are_cpp14(launch: Launch, clang: list[str]) -> None:
    text = (SHADERS / f"{launch.shader}.metal").read_text()
    source = f'{text}\n#line 1 "instantiations"\n{launch.instantiation}\n'
    assert extension_warnings(source, f"{launch.shader}.metal", clang) == []


def test_newer_constructs_are_found(clang: list[str]) -> None:
    body = "if (float x = a[0]; x > 0.0f) a[0] = 1.0f;"
    source = f"kernel void f(device float* a [[buffer(0)]]) {{ {body} }}"
    assert "program.metal:1" in extension_warnings(source, "program.metal", clang)[0]


@pytest.mark.parametrize("path", sorted([*SHADERS.glob("*.metal"), *SHADERS.glob("*.h")]), ids=str)
def test_no_forbidden_words(path) -> None:
    text = re.sub(r"//[^\n]*", "", path.read_text())
    tokens = [token for token in tokenize(text) if token.kind == "name"]
    assert {token.text for token in tokens} & FORBIDDEN == set()


def rewrite(source: str) -> Program:
    rewriter = Rewriter(tokenize(source))
    rewriter.run()
    return rewriter.program


def test_what_the_translator_finds() -> None:
    program = rewrite(
        "constant uint n [[function_constant(kSize)]];\n"
        "template <typename T, uint rows>\n"
        "[[kernel, max_total_threads_per_threadgroup(rows * 32)]] void f(\n"
        "    device const T* a [[buffer(kA)]], constant Params& p [[buffer(1)]],\n"
        "    threadgroup float* t [[threadgroup(0)]], uint i [[thread_index_in_threadgroup]]) {}\n"
        'template [[host_name("f_" "2")]] [[kernel]] decltype(f<float, 2>) f<float, 2>;\n'
        "kernel void g(device int* a [[buffer(0)]]) {}\n"
    )
    assert program.constants == [("kSize", "uint", "n")]
    assert [(i.host_name, i.function) for i in program.instances] == [("f_2", "f"), ("g", "g")]
    kernel = program.kernels["f"]
    assert [(p.kind, p.index) for p in kernel.parameters] == [
        ("buffer", "kA"),
        ("constant", "1"),
        ("threadgroup", "0"),
        ("index", "thread_index_in_threadgroup"),
    ]
    assert kernel.max_threads == "rows * 32"
    assert kernel.template_header == "template < typename T , uint rows >"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("void f() { threadgroup float t[4]; }", "threadgroup 't' outside a kernel"),
        ("threadgroup float t[4];", "threadgroup 't' outside a kernel"),
        ("kernel void f(device float* a) {}", "'a' has no attribute the translator knows"),
        ("kernel void f(texture2d<float> t [[texture(0)]]) {}", "no attribute the translator"),
        ('template [[host_name("x")]] kernel void g<1>(uint);', "no kernel named g"),
    ],
)
def test_what_the_translator_refuses(source: str, message: str, simulator: Simulator) -> None:
    with pytest.raises(SimulatorError, match=re.escape(message)):
        simulator.compile(source)
