"""Every shader keeps its address spaces apart, and the check finds planted mistakes."""

from __future__ import annotations

import sys

import pytest
from register_cases import REGISTER_KERNELS, fitting, merge_launch, probe_launch
from shader_cases import KERNELS, OPTION_KERNELS, STORAGE, Case, Launch, staged
from simulator import METAL, SHADERS

sys.path += [str(METAL / "address_space"), str(METAL / "translate")]

from build_kernel import find_clang
from check import check


def messages(source: str) -> list[str]:
    return check(source, "program.metal", [str(SHADERS)], find_clang(""))


def shader(launch: Launch) -> str:
    text = (SHADERS / f"{launch.shader}.metal").read_text()
    return f'{text}\n#line 1 "instantiations"\n{launch.instantiation}\n'


@pytest.mark.parametrize("dtype", list(STORAGE))
@pytest.mark.parametrize("kernel", [*KERNELS, *OPTION_KERNELS])
def test_shaders_are_clean(kernel: str, dtype: str) -> None:
    assert messages(shader(staged(Case(dtype=dtype), kernel))) == []


@pytest.mark.parametrize("dtype", list(STORAGE))
@pytest.mark.parametrize("kernel", REGISTER_KERNELS)
def test_register_shaders_are_clean(kernel: str, dtype: str) -> None:
    for held in (True, False):
        register = fitting(kernel, Case(dtype=dtype), held=held, value_held=held)
        assert messages(shader(register.launch())) == []


def test_helpers_of_register_kernels_are_clean() -> None:
    launches = [*(merge_launch(dtype) for dtype in STORAGE), probe_launch(), probe_launch("half")]
    for launch in launches:
        assert messages(shader(launch)) == []


PROGRAM = """#include <metal_stdlib>
using namespace metal;
struct Params { uint n; };
inline void add(threadgroup float* t, device const float* s, uint i) { t[i] += s[i]; }
kernel void f(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
              constant Params& params [[buffer(2)]], uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  float local[4];
  BODY
}
"""

MISTAKES = [
    "add(local, in, tid);",
    "add(tile, tile, tid);",
    "add(out, in, tid);",
    "device float* p = tile; p[0] = 1.0f;",
    "threadgroup float* p = out; p[0] = 1.0f;",
    "threadgroup float* p = local; p[0] = 1.0f;",
    "device float* p = local; p[0] = 1.0f;",
    "device float* p = in; p[0] = 1.0f;",
    "in[tid] = 1.0f;",
    "params.n = 3u;",
    "device const Params* p = &params; out[0] = float(p->n);",
    "constant float* p = in; out[0] = p[0];",
    "threadgroup float* p = (device float*)tile; p[0] = 1.0f;",
    "thread float* p = tile; p[0] = 1.0f;",
    "float* p = local; p[0] = 1.0f;",
    "float& r = tile[0]; r = 1.0f;",
    "simdgroup_float8x8 m; simdgroup_load(m, local, 8);",
    "simdgroup_float8x8 m; simdgroup_store(m, in, 8);",
]


@pytest.mark.parametrize("body", MISTAKES)
def test_planted_mistakes_are_found(body: str) -> None:
    found = messages(PROGRAM.replace("BODY", body))
    assert any("program.metal:9" in text and "error" in text for text in found), found


RIGHT = [
    "add(tile, in, tid); const Params copy = params; out[tid] = tile[tid] * float(copy.n);",
    "threadgroup float* p = tile + 3; thread float* r = local; out[0] = p[0] + r[0];",
    "device float* q = out; q[0] = 1.0f;",
    "simdgroup_float8x8 m; simdgroup_load(m, tile, 8);",
    "simdgroup_float8x8 m; simdgroup_store(m, out, 8, ulong2(0, 0), true);",
    "threadgroup float4* v = (threadgroup float4*)tile; v[0] = float4(1.0f, 2.0f, 3.0f, 4.0f);",
    "const uint n = params.n * 2u; out[0] = float(n);",
]


@pytest.mark.parametrize("body", RIGHT)
def test_right_programs_pass(body: str) -> None:
    assert messages(PROGRAM.replace("BODY", body)) == []
