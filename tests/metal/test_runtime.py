"""The simulated device runs MSL: language, matrices under every map, lane operations, limits,
threads and processes.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from simulator import METAL, Simulator, SimulatorError

PRELUDE = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
MAPS = [
    "row",
    "column",
    "apple",
    "apple_transposed",
    "random:1",
    "random:2",
    "row_pair:3",
    "adjacent:4",
    "column_pair:5",
]


def compute(
    simulator: Simulator, expression: str, dtype: str = "float", inputs: str = "float"
) -> np.ndarray:
    """out[i] = expression of x = in[i], over 32 lanes of one simdgroup."""
    source = f"""{PRELUDE}
    kernel void f(device const {inputs}* in [[buffer(0)]], device {dtype}* out [[buffer(1)]],
                  uint i [[thread_index_in_threadgroup]]) {{
      const {inputs} x = in[i];
      out[i] = {dtype}({expression});
    }}"""
    types = {
        "float": np.float32,
        "half": np.float16,
        "bfloat": ml_dtypes.bfloat16,
        "uint": np.uint32,
    }
    data = (np.arange(32) - 7.25).astype(types[inputs])
    out = np.zeros(32, types[dtype])
    result = simulator.compile(source).kernel("f")((1, 1, 1), (32, 1, 1), [data, out])
    assert result.reports == []
    return out


X = (np.arange(32) - 7.25).astype(np.float32)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("fast::exp2(x)", np.exp2(X)),
        ("precise::exp(x)", np.exp(X)),
        ("log2(abs(x))", np.log2(np.abs(X))),
        ("fma(x, 2.0f, 1.0f)", 2 * X + 1),
        ("max(x, 0.0f) + min(x, 0.0f)", X),
        ("clamp(x, -1.0f, 1.0f)", np.clip(X, -1, 1)),
        ("select(1.0f, 2.0f, x > 0.0f)", np.where(X > 0, 2, 1)),
        ("as_type<float>(as_type<uint>(x))", X),
        ("dot(float4(x, 1.0f, 2.0f, 3.0f), float4(1.0f))", X + 6),
        ("float4(float2(x, 1.0f), 2.0f, 3.0f).z", np.full(32, 2.0)),
        ("(float4(x) * 2.0f).wzyx.y", 2 * X),
        ("vec<float, 2>(x, 3.0f)[1]", np.full(32, 3.0)),
        ("simd_shuffle_xor(x, 5)", X[np.arange(32) ^ 5]),
        ("simd_shuffle(x, 3)", np.full(32, X[3])),
        ("simd_shuffle_down(x, 1)", X[np.minimum(np.arange(32) + 1, 31)]),
        ("simd_broadcast_first(x)", np.full(32, X[0])),
        ("simd_max(x)", np.full(32, X.max())),
        ("simd_sum(x)", np.full(32, X.sum())),
        ("simd_any(x > 24.0f) ? 1.0f : 0.0f", np.zeros(32)),
        ("simd_all(x < 24.0f) ? 1.0f : 0.0f", np.ones(32)),
        ("isfinite(x / 0.0f) ? 1.0f : 0.0f", np.zeros(32)),
    ],
)
def test_expressions(expression: str, expected: np.ndarray, simulator: Simulator) -> None:
    np.testing.assert_allclose(
        compute(simulator, expression), expected.astype(np.float32), rtol=1e-6
    )


@pytest.mark.parametrize("dtype", ["half", "bfloat"])
def test_narrow_types_round_to_nearest_even(dtype: str, simulator: Simulator) -> None:
    values = np.float32(1) + np.arange(32, dtype=np.float32) / 2**12
    source = f"""{PRELUDE}
    kernel void f(device const float* in [[buffer(0)]], device {dtype}* out [[buffer(1)]],
                  uint i [[thread_index_in_threadgroup]]) {{ out[i] = {dtype}(in[i]); }}"""
    kind = np.float16 if dtype == "half" else ml_dtypes.bfloat16
    out = np.zeros(32, kind)
    simulator.compile(source).kernel("f")((1, 1, 1), (32, 1, 1), [values, out])
    np.testing.assert_array_equal(out.view(np.uint16), values.astype(kind).view(np.uint16))


MATRIX = """
template <typename T, typename A>
kernel void product(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]],
                    device float* c [[buffer(2)]]) {{
  simdgroup_matrix<T, 8, 8> x, y;
  simdgroup_matrix<A, 8, 8> sum = make_filled_simdgroup_matrix<A, 8, 8>(A(1.0f));
  simdgroup_load(x, a, 10);
  simdgroup_load(y, b, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(sum, x, y, sum);
  sum.thread_elements()[0] *= A(2.0f);
  sum.thread_elements()[1] *= A(2.0f);
  simdgroup_matrix<float, 8, 8> wide;
  wide.thread_elements()[0] = float(sum.thread_elements()[0]);
  wide.thread_elements()[1] = float(sum.thread_elements()[1]);
  simdgroup_store(wide, c, 8);
}}
template [[host_name("p")]] kernel void product<{types}>(device const {stored}*,
                                                         device const {stored}*, device float*);
"""


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("types", ["float, float", "half, float", "half, half", "bfloat, float"])
def test_matrix_product(types: str, name: str, simulator: Simulator) -> None:
    simulator.set(map=name)
    stored = types.split(",")[0]
    kind = {"float": np.float32, "half": np.float16, "bfloat": ml_dtypes.bfloat16}[stored]
    rng = np.random.default_rng(1)
    a = rng.integers(-3, 4, (8, 10)).astype(kind)
    b = rng.integers(-3, 4, (8, 8)).astype(kind)
    c = np.zeros((8, 8), np.float32)
    library = simulator.compile(PRELUDE + MATRIX.format(types=types, stored=stored))
    result = library.kernel("p")((1, 1, 1), (32, 1, 1), [a, b, c])
    wide = (a[:, :8].astype(np.float64), b.astype(np.float64))
    np.testing.assert_array_equal(c, 2 * (wide[0] @ wide[1].T + 1))
    assert result.reports == []
    assert result.counters["matrix_multiplies"] == 1
    assert result.counters["matrix_loads_device"] == 2


def test_every_map_is_a_bijection_and_maps_differ(simulator: Simulator) -> None:
    source = f"""{PRELUDE}
    kernel void f(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                  uint lane [[thread_index_in_simdgroup]]) {{
      simdgroup_float8x8 m;
      simdgroup_load(m, in, 8);
      out[lane * 2] = m.thread_elements()[0];
      out[lane * 2 + 1] = m.thread_elements()[1];
    }}"""
    kernel = simulator.compile(source).kernel("f")
    seen = set()
    for name in MAPS:
        simulator.set(map=name)
        out = np.zeros(64, np.float32)
        kernel((1, 1, 1), (32, 1, 1), [np.arange(64, dtype=np.float32), out])
        assert sorted(out) == list(range(64))
        seen.add(tuple(out))
    assert len(seen) == len(MAPS)


def test_an_undefined_matrix_is_nan(simulator: Simulator) -> None:
    source = f"""{PRELUDE}
    kernel void f(device float* out [[buffer(0)]]) {{
      simdgroup_float8x8 m;
      simdgroup_store(m, out, 8);
    }}"""
    out = np.zeros(64, np.float32)
    simulator.compile(source).kernel("f")((1, 1, 1), (32, 1, 1), [out])
    assert np.isnan(out).all()


LIMITS = """
enum Slot { kOut = 2 };
template <uint rows>
[[kernel, max_total_threads_per_threadgroup(rows * 32)]] void f(
    device float* out [[buffer(kOut)]], constant float2& scale [[buffer(0)]],
    threadgroup float* shared [[threadgroup(0)]], uint3 at [[thread_position_in_grid]]) {
  threadgroup alignas(16) float tile[rows * 8];
  threadgroup uint flags[rows], other;
  if (at.x == 0) { tile[0] = scale.x; flags[0] = other = 1u; shared[0] = 2.0f; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[at.x] = tile[0] + shared[0] + float(flags[0] + other);
}
template [[host_name("f2")]] [[kernel]] decltype(f<2>) f<2>;
"""


def test_attributes_and_limits(simulator: Simulator) -> None:
    kernel = simulator.compile(PRELUDE + LIMITS).kernel("f2")
    assert kernel.max_threads == 64
    assert kernel.static_threadgroup_bytes == 64 + 16 + 16
    out = np.zeros(50, np.float32)
    buffers = [np.float32([5, 0]).tobytes(), None, out]
    result = kernel((1, 1, 1), (64, 1, 1), buffers, threadgroup_bytes=[16], grid_threads=(50, 1, 1))
    assert result.reports == []
    assert (out == 9).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": (96, 1, 1)}, "96 threads per threadgroup, the pipeline allows 64"),
        ({"buffers": [bytes(8), None, None]}, "argument 'out' at index 2 has no buffer"),
        ({"buffers": [bytes(4), None, np.zeros(50, np.float32)]}, "needs 8 bytes, 4 are bound"),
        ({"threadgroup_bytes": []}, "has no threadgroup memory length"),
        ({"threadgroup_bytes": [40000]}, "bytes of threadgroup memory, the device has 32768"),
        ({"threadgroups": (0, 1, 1)}, "a grid of 0 threadgroups"),
    ],
)
def test_impossible_requests_are_refused(change: dict, message: str, simulator: Simulator) -> None:
    kernel = simulator.compile(PRELUDE + LIMITS).kernel("f2")
    request = {
        "threadgroups": (1, 1, 1),
        "threads": (32, 1, 1),
        "buffers": [bytes(8), None, np.zeros(50, np.float32)],
        "threadgroup_bytes": [16],
    }
    with pytest.raises(SimulatorError, match=message):
        kernel(**(request | change))


def test_compile_errors_carry_the_line(simulator: Simulator) -> None:
    with pytest.raises(SimulatorError, match=r"bad\.metal:3:.*undeclared identifier 'nothing'"):
        simulator.compile(
            "kernel void f(device float* o [[buffer(0)]]) {\n\n  o[0] = nothing;\n}", "bad.metal"
        )
    with pytest.raises(SimulatorError, match="double"):
        simulator.compile("kernel void f(device float* o [[buffer(0)]]) { o[0] = o[1] * 2.0; }")
    with pytest.raises(SimulatorError, match="no function 'g'"):
        simulator.compile("kernel void f(device float* o [[buffer(0)]]) { o[0] = 1.0f; }").kernel(
            "g"
        )


def test_function_constants_belong_to_the_kernel(simulator: Simulator) -> None:
    source = """
    constant bool flag [[function_constant(0)]];
    constant uint count [[function_constant(1)]];
    constant float factor [[function_constant(2)]];
    constant bool has = is_function_constant_defined(factor);
    kernel void f(device float* o [[buffer(0)]]) {
      o[0] = flag ? 1.0f : 2.0f;
      o[1] = float(count);
      o[2] = is_function_constant_defined(factor) ? factor : -1.0f;
    }"""
    source = source.replace("    constant bool has = is_function_constant_defined(factor);\n", "")
    library = simulator.compile(source)
    first = library.kernel("f", {0: True, 1: 7, 2: 0.5})
    second = library.kernel("f", {0: False, 1: 9})
    out = np.zeros((2, 3), np.float32)
    for kernel, row in ((first, out[0]), (second, out[1]), (first, out[0])):
        assert kernel((1, 1, 1), (1, 1, 1), [row]).reports == []
    np.testing.assert_array_equal(out, [[1, 7, 0.5], [2, 9, -1]])


def test_many_threads_dispatch_at_once(simulator: Simulator) -> None:
    source = f"""{PRELUDE}
    constant float add [[function_constant(0)]];
    kernel void f(device float* o [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {{
      threadgroup float tile[128];
      tile[i] = float(i) + add;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      o[i] = simd_sum(tile[127 - i]);
    }}"""
    library = simulator.compile(source)
    failures = []

    def work(number: int) -> None:
        kernel = library.kernel("f", {0: float(number)})
        for _ in range(20):
            out = np.zeros(128, np.float32)
            result = kernel((1, 1, 1), (128, 1, 1), [out])
            want = (np.arange(128)[::-1] + number).reshape(4, 32).sum(1).repeat(32)
            if result.reports or not (out == want).all():
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_processes_share_the_cache(tmp_path: Path) -> None:
    """Four processes ask for one module at once: one compiles, nobody fails."""
    program = (
        "from simulator import Simulator\n"
        f"s = Simulator(cache=r'{tmp_path}')\n"
        "print(s.compile('kernel void f(device float* o [[buffer(0)]]) {}').function_names())\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program], cwd=METAL, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    outputs = [child.communicate()[0].strip() for child in children]
    assert outputs == ["['f']"] * 4
    assert len(list(tmp_path.glob("*.so"))) == 1


@pytest.mark.parametrize("name", ["elliptic", "random", "random:x"])
def test_unknown_maps_are_refused(name: str, simulator: Simulator) -> None:
    with pytest.raises(SimulatorError, match="METAL_SIM_MAP"):
        simulator.set(map=name)


def test_schedules_are_different_orders_of_the_same_threads(simulator: Simulator) -> None:
    source = f"""{PRELUDE}
    kernel void f(device atomic_uint* next [[buffer(0)]], device uint* order [[buffer(1)]],
                  uint i [[thread_index_in_threadgroup]]) {{
      threadgroup_barrier(mem_flags::mem_none);
      order[atomic_fetch_add_explicit(next, 1u, memory_order_relaxed)] = i;
    }}"""
    kernel = simulator.compile(source).kernel("f")
    orders = {}
    seeded = [(name, seed) for name in ("random", "priority") for seed in (1, 2)]
    for schedule, seed in [("fifo", 1), ("lifo", 1), *seeded]:
        simulator.set(schedule=schedule, seed=seed)
        for repetition in range(2):
            order = np.zeros(128, np.uint32)
            kernel((1, 1, 1), (128, 1, 1), [np.zeros(1, np.uint32), order])
            assert sorted(order) == list(range(128))
            assert repetition == 0 or tuple(order) == orders[schedule, seed]
            orders[schedule, seed] = tuple(order)
    assert orders["fifo", 1] == tuple(range(128))
    assert len(set(orders.values())) == len(orders)
