"""`long_cpu.py FOLDER`: the CPU backend on the problems of which long.cu left samples, and on its
kept weights.

Inputs are drawn again, to the same bits. Both backends' samples are held to tests/tolerance.py
against the float64 values in the file; of the kept weights every bit is the same. The float64
values and the plain computation's distances are themselves held against tests/reference.py and
tests/naive.py on a few rows. Relies on an installed flashattn.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import flashattn as fa
import reference
from naive import Naive
from numpy.typing import NDArray
from tolerance import FORWARD_FACTOR, GRADIENT_FACTOR, assert_close

NAMES = ("out", "lse", "dq", "dk", "dv")
FACTORS = {name: FORWARD_FACTOR if name in ("out", "lse") else GRADIENT_FACTOR for name in NAMES}
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
KEPT_P = 0.25
FEW_ROWS = 64


class Source:
    """problem.cpp's, many values at a time: a linear congruential generator's n-th state is
    a^n s + c (1 + a + ... + a^(n-1)).
    """

    def __init__(self) -> None:
        self.state = np.uint32(12345)

    def draw(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        count = 4 * int(np.prod(shape))
        powers = np.full(count, 1664525, np.uint32)
        np.multiply.accumulate(powers, out=powers)
        sums = np.ones(count, np.uint32)
        sums[1:] = powers[:-1]
        np.add.accumulate(sums, out=sums)
        states = powers * self.state + sums * np.uint32(1013904223)
        self.state = states[-1]
        units = (states >> np.uint32(8)).astype(np.float32) / np.float32(16777216) - np.float32(0.5)
        total = np.zeros(count // 4, np.float32)
        for part in units.reshape(-1, 4).T:
            total += part
        return (total * np.float32(1.7320508)).reshape(shape)


@dataclass
class Problem:
    facts: dict[str, Any]

    def __post_init__(self) -> None:
        f, source = self.facts, Source()
        dtype = DTYPES[f["storage"]]
        shapes = {
            "query": (f["seqlen_q"], f["query_heads"]),
            "key": (f["seqlen_k"], f["kv_heads"]),
            "value": (f["seqlen_k"], f["kv_heads"]),
            "dout": (f["seqlen_q"], f["query_heads"]),
        }
        drawn = {
            name: source.draw((1, *shape, f["dim"])).astype(dtype) for name, shape in shapes.items()
        }
        self.query, self.key, self.value, self.dout = drawn.values()

    @property
    def options(self) -> dict[str, Any]:
        f = self.facts
        right = 0 if f["causal"] else f["window"]
        options: dict[str, Any] = {"causal": f["causal"], "window": (f["window"], right)}
        if f["window"] < 0:
            options["window"] = (-1, -1)
        if f["dropout_p"]:
            options |= {key: f[key] for key in ("dropout_p", "dropout_seed", "dropout_offset")}
        return options

    def run_cpu(self) -> dict[str, NDArray[Any]]:
        """Results as (row, ...), the log-sum-exp as (head row)."""
        options = {**self.options, "backend": "cpu"}
        out, lse = fa.attention(self.query, self.key, self.value, return_lse=True, **options)
        gradients = fa.attention_backward(
            self.dout, self.query, self.key, self.value, out, lse, **options
        )
        found = {"out": out, "lse": lse.reshape(1, -1)}
        found |= {name: getattr(gradients, name) for name in ("dq", "dk", "dv")}
        return {name: x[0] for name, x in found.items()}

    def rows(self, first: int) -> tuple[tuple[NDArray[Any], ...], dict[str, Any]]:
        """A few query rows and their options, for what stores the scores of whole problems."""
        f = self.facts
        options = {**self.options, "q_offset": first + f["seqlen_k"] - f["seqlen_q"]}
        if f["dropout_p"]:
            options["dropout_shard"] = reference.DropoutShard(
                f["query_heads"], 0, f["seqlen_q"], first, f["seqlen_k"], 0
            )
        return (self.query[:, first : first + FEW_ROWS], self.key, self.value), options


def read(path: Path) -> tuple[dict[str, Any], dict[str, tuple[NDArray, NDArray]]]:
    """The problem, and per tensor the GPU's and the exact samples."""
    line, _, rest = path.read_bytes().partition(b"\n")
    facts = json.loads(line)
    pairs = np.frombuffer(rest, np.float64).reshape(-1, 2)
    samples, first = {}, 0
    for name in NAMES:
        heads = facts["kv_heads" if name in ("dk", "dv") else "query_heads"]
        rows = facts["seqlen_k" if name in ("dk", "dv") else "seqlen_q"]
        shape = (heads, facts["dim"])
        if name == "lse":
            rows, shape = rows * heads, ()
        count = -(-rows // facts["stride"])
        size = count * int(np.prod(shape))
        part = pairs[first : first + size].reshape(count, *shape, 2)
        samples[name] = (part[..., 0], part[..., 1])
        first += size
    assert first == len(pairs), f"{path.name}: {len(pairs) - first} values too many"
    return facts, samples


def check_exact(problem: Problem, samples: dict[str, tuple[NDArray, NDArray]]) -> None:
    """The float64 `out` against tests/reference.py, on the first of a few rows at a time; and how
    far tests/naive.py is from it. One row alone would say nothing of the latter: a product with one
    row is summed in another order.
    """
    distance = 0.0
    for n in (0, 23, 46):
        arrays, options = problem.rows(n * problem.facts["stride"])
        exact = reference.attention(*arrays, **options).out[0]
        np.testing.assert_allclose(samples["out"][1][n], exact[0], rtol=1e-10, atol=1e-14)
        out, _ = Naive(*arrays, **options).forward()
        distance = max(distance, float(np.abs(out[0] - exact).max()))
    print(
        f"  plain out on {3 * FEW_ROWS} rows: {distance:.2e} off; on all, by long.cu:"
        f" {problem.facts['naive']['out']:.2e}"
    )


def check_samples(path: Path) -> int:
    facts, samples = read(path)
    problem, start, failures = Problem(facts), time.perf_counter(), 0
    found = problem.run_cpu()
    print(f"{path.stem}: CPU backend in {time.perf_counter() - start:.0f} s")
    check_exact(problem, samples)
    dtype = DTYPES[facts["storage"]]
    for name, (gpu, exact) in samples.items():
        stored = np.dtype(np.float32) if name == "lse" else dtype
        cpu = found[name][:: facts["stride"]]
        yardstick = facts["naive"][name]
        for backend, x in (("GPU", gpu.astype(stored)), ("CPU", cpu)):
            try:
                assert_close(x, exact, yardstick, factor=FACTORS[name], name=name)
            except AssertionError as error:
                print(f"  FAIL {backend}: {error}")
                failures += 1
        errors = [float(np.abs(x.astype(np.float64) - exact).max()) for x in (gpu, cpu)]
        apart = float(np.abs(cpu.astype(np.float64) - gpu).max())
        print(
            f"  {name:3} of {exact.size}: GPU {errors[0]:.2e}, CPU {errors[1]:.2e} from float64,"
            f" {apart:.2e} apart, plain {yardstick:.2e}"
        )
    return failures


def check_kept(path: Path, facts: dict[str, Any]) -> int:
    """Which weights the CPU backend keeps, where each of them is an element of out."""
    dim = int(path.stem.removeprefix("kept_"))
    rows, heads = 32768, 4
    facts = {
        **facts, "storage": "float32", "seqlen_q": rows, "seqlen_k": rows, "query_heads": heads,
        "kv_heads": heads, "dim": dim, "causal": True, "window": dim - 1, "dropout_p": KEPT_P,
    }  # fmt: skip
    problem = Problem(facts)
    one_hot = np.eye(dim, dtype=np.float32)[np.arange(rows) % dim]
    value = np.broadcast_to(one_hot[None, :, None, :], (1, rows, heads, dim))
    out = fa.attention(problem.query, problem.key, value, backend="cpu", **problem.options)
    kept = out != 0
    gpu = np.unpackbits(np.fromfile(path, np.uint8)).astype(bool)
    same = np.array_equal(gpu, kept.reshape(-1))
    share = kept.sum() / (rows * dim - dim * (dim - 1) / 2) / heads
    print(f"{path.stem}: {gpu.size} weights, {share:.4f} kept, {'the same' if same else 'FAIL'}")
    return 0 if same else 1


def main() -> None:
    folder = Path(sys.argv[1])
    paths = sorted(folder.glob("*.bin"))
    facts, _ = read(next(path for path in paths if "dropout" in path.stem))
    failures = sum(check_samples(path) for path in paths)
    failures += sum(check_kept(path, facts) for path in sorted(folder.glob("kept_*.bits")))
    print(f"{failures} failures")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
