"""The checker reports planted defects at their .metal line, and nothing on right kernels."""

from __future__ import annotations

import re

import numpy as np
import pytest
from simulator import Run, Simulator

HEAD = """
#include <metal_stdlib>
using namespace metal;
kernel void f(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
              constant uint& n [[buffer(2)]], uint tid [[thread_index_in_threadgroup]],
              uint group [[threadgroup_position_in_grid]],
              uint lane [[thread_index_in_simdgroup]]) {
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
  threadgroup float tile[64];
  threadgroup float other[8];
"""


def run(
    simulator: Simulator, body: str, groups: int = 1, threads: int = 64
) -> tuple[Run, np.ndarray]:
    """Runs a kernel body over 64 inputs and 128 outputs; body line k is program.metal:k."""
    source = HEAD.strip() + f'\n#line 1 "program.metal"\n{body}\n}}\n'
    data = np.arange(64, dtype=np.float32)
    out = np.zeros(128, np.float32)
    kernel = simulator.compile(source).kernel("f")
    result = kernel((groups, 1, 1), (threads, 1, 1), [data, out, np.uint32([64]).tobytes()])
    return result, out


FAULTS = {
    # name: (body, threadgroups, what the report says; LINE must be named)
    "race between simdgroups": (
        "tile[tid] = in[tid];\nout[tid] = tile[63 - tid];",
        1,
        r"race on threadgroup 'tile': read at program.metal:2 .* earlier write at program.metal:1",
    ),
    "race within a simdgroup": (
        "if (tid < 32) tile[tid] = in[tid];\nif (tid < 32) out[tid] = tile[31 - tid];",
        1,
        r"race on threadgroup 'tile': read at program.metal:2",
    ),
    "shuffles order nothing": (
        "tile[tid] = in[tid];\nout[tid] = simd_shuffle_xor(tile[tid], 1);\n"
        "if (tid < 32) out[tid] = tile[31 - tid];",
        1,
        r"race on threadgroup 'tile': read at program.metal:3 .* earlier write at program.metal:1",
    ),
    "a write after a read by another simdgroup": (
        "tile[tid] = 0.0f;\nBARRIER;\nout[tid] = tile[63 - tid];\ntile[tid] = 1.0f;",
        1,
        r"race on threadgroup 'tile': write at program.metal:4 .* earlier read at program.metal:3",
    ),
    "a write after reads by several lanes of one simdgroup": (
        "if (tid == 0) tile[0] = 0.0f;\nBARRIER;\n"
        "if (tid < 32) out[tid] = tile[0];\nif (tid == 31) tile[0] = 1.0f;",
        1,
        r"race on threadgroup 'tile': write at program.metal:4 .* earlier read at program.metal:3",
    ),
    "barrier with mem_none": (
        "tile[tid] = in[tid];\n"
        "threadgroup_barrier(mem_flags::mem_none);\n"
        "out[tid] = tile[63 - tid];",
        1,
        r"read at program.metal:3 .* barrier at program.metal:2 does not name this memory "
        r"in its mem_flags",
    ),
    "barrier with mem_device for threadgroup memory": (
        "tile[tid] = in[tid];\n"
        "threadgroup_barrier(mem_flags::mem_device);\n"
        "out[tid] = tile[63 - tid];",
        1,
        r"read at program.metal:3 .* barrier at program.metal:2 does not name",
    ),
    "barrier with mem_threadgroup for device memory": (
        "out[tid] = 1.0f;\nBARRIER;\nout[tid + 64] = out[63 - tid];",
        1,
        r"race on device 'out': read at program.metal:3 .* barrier at program.metal:2 "
        r"does not name",
    ),
    "race between threadgroups": (
        "out[tid] = in[tid];",
        2,
        r"race on device 'out': write at program.metal:1 .* no barrier orders threadgroups",
    ),
    "device read out of bounds": (
        "const uint i = tid + 1;\nout[tid] = in[i];",
        1,
        r"out-of-bounds read of 4 bytes in device memory at program.metal:2: byte 256 of "
        r"'in', which has 256",
    ),
    "device write out of bounds": (
        "out[2 * tid + 2] = 1.0f;",
        1,
        r"out-of-bounds write of 4 bytes in device memory at program.metal:1: byte 512 of 'out'",
    ),
    "threadgroup read out of bounds": (
        "other[tid % 8] = 0.0f;\nBARRIER;\nout[tid] = other[tid % 9];",
        1,
        r"out-of-bounds read of 4 bytes in threadgroup memory at program.metal:3: byte 32 "
        r"of 'other'",
    ),
    "threadgroup write out of bounds": (
        "tile[tid + 4] = in[tid];",
        1,
        r"out-of-bounds write of 4 bytes in threadgroup memory at program.metal:1: byte "
        r"256 of 'tile'",
    ),
    "uninitialised threadgroup read": (
        "if (tid != 5) tile[tid] = in[tid];\nBARRIER;\nout[tid] = tile[tid];",
        1,
        r"uninitialised read of threadgroup 'tile' \(byte 20\) at program.metal:3 by thread 5",
    ),
    "write through const": (
        "out[tid] = in[tid];\n((device float*)in)[tid] = 0.0f;",
        1,
        r"write to read-only buffer 'in' at program.metal:2",
    ),
    "write to constant": (
        "if (tid == 0)\n  *(thread uint*)&n = 3u;",
        1,
        r"write to read-only buffer 'n' at program.metal:2",
    ),
    "divergent threadgroup barrier": (
        "if (tid < 32) BARRIER;\nelse\n  BARRIER;\nout[tid] = 1.0f;",
        1,
        r"divergent barrier: threads meet in threadgroup_barrier at program.metal:(1|3) "
        r"and .*:(1|3)",
    ),
    "barrier skipped by an early return": (
        "if (tid >= 40) return;\nBARRIER;\nout[tid] = 1.0f;",
        1,
        r"divergent barrier: .*program.metal:2",
    ),
    "vote in divergent code": (
        "if (lane < 16)\n  out[tid] = simd_any(in[tid] > 3.0f) ? 1.0f : 0.0f;",
        1,
        r"these threads wait forever: .*simd_any at program.metal:2|divergent",
    ),
    "matrix load without a barrier": (
        "tile[tid] = in[tid];\nsimdgroup_float8x8 m;\nsimdgroup_load(m, tile, 8);\n"
        "simdgroup_store(m, out, 8);",
        1,
        r"race on threadgroup 'tile': read at program.metal:3 .* earlier write at program.metal:1",
    ),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_planted_defect_is_reported(name: str, simulator: Simulator) -> None:
    body, groups, pattern = FAULTS[name]
    result, _ = run(simulator, body, groups)
    assert any(re.search(pattern, text) for text in result.reports), result.reports


def test_a_constant_without_value_is_reported(simulator: Simulator) -> None:
    source = (
        "constant uint missing [[function_constant(9)]];\n"
        "kernel void f(device uint* o [[buffer(0)]]) { o[0] = missing; }"
    )
    kernel = simulator.compile(source).kernel("f")
    result = kernel((1, 1, 1), (1, 1, 1), [np.zeros(1, np.uint32)])
    assert result.reports == ["f: function constant 9 is used but was given no value"]


RIGHT = {
    "barrier between": "tile[tid] = in[tid];\nBARRIER;\nout[tid] = tile[63 - tid];",
    "simdgroup barrier within a simdgroup": (
        "tile[tid] = in[tid];\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "out[tid] = tile[tid ^ 31];"
    ),
    "own element": "tile[tid] = in[tid];\nout[tid] = tile[tid];",
    "neighbouring halves": (
        "threadgroup half* h = (threadgroup half*)tile;\n"
        "h[tid] = half(in[tid]);\n"
        "out[tid] = float(h[tid]);"
    ),
    "device barrier": (
        "out[tid] = in[tid];\n"
        "threadgroup_barrier(mem_flags::mem_device);\n"
        "out[tid + 64] = out[63 - tid];"
    ),
    "uniform branch around a barrier": (
        "if (n == 64) { tile[tid] = in[tid];\nBARRIER;\nout[tid] = tile[63 - tid]; }"
    ),
}


@pytest.mark.parametrize("schedule", ["fifo", "lifo", "random", "priority"])
@pytest.mark.parametrize("name", list(RIGHT))
def test_right_kernels_are_silent(name: str, schedule: str, simulator: Simulator) -> None:
    simulator.set(schedule=schedule)
    result, _ = run(simulator, RIGHT[name])
    assert result.reports == []


def test_atomics_do_not_race(simulator: Simulator) -> None:
    source = """
    #include <metal_stdlib>
    using namespace metal;
    kernel void f(device atomic_uint* total [[buffer(0)]], uint i [[thread_position_in_grid]]) {
      atomic_fetch_add_explicit(total, i, memory_order_relaxed);
    }"""
    total = np.zeros(1, np.uint32)
    result = simulator.compile(source).kernel("f")((4, 1, 1), (64, 1, 1), [total])
    assert result.reports == []
    assert total[0] == 255 * 128


def test_reports_go_to_the_file(simulator: Simulator, tmp_path) -> None:
    simulator.set(reports=tmp_path / "reports.txt")
    run(simulator, FAULTS["uninitialised threadgroup read"][0])
    simulator.set(reports="")
    assert (tmp_path / "reports.txt").read_text().startswith("f: uninitialised read")


def test_a_plain_module_reports_only_what_it_can_see(simulator: Simulator) -> None:
    """Without the hooks races go unnoticed, divergence does not."""
    simulator.set(check=False)
    assert run(simulator, FAULTS["race between simdgroups"][0])[0].reports == []
    assert run(simulator, FAULTS["divergent threadgroup barrier"][0])[0].reports
