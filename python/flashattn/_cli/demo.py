"""Forward and backward of one transformer-sized problem: error, speed, memory, and a picture.

The picture (what the first head looks at, the errors, the memory) is written to the current folder
when matplotlib is there; --picture chooses the file, --no-picture leaves it out.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import flashattn as fa
from flashattn import _core
from flashattn._cli import reference
from flashattn._cli.child import run_child
from flashattn._cli.problems import flops, numpy_dtype, random_arrays
from flashattn._cli.progress import progress

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The size of the problem, and the picture."""
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--picture", type=Path, default=Path("flashattn-demo.png"))
    parser.add_argument("--no-picture", action="store_true")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The demonstration as plain values."""
    shape = (1, arguments.seqlen, arguments.heads, arguments.head_dim)
    dtype = numpy_dtype(arguments.dtype)
    if dtype is None:
        raise SystemExit("demo: bfloat16 needs the package ml_dtypes")
    q, k, v, dout = random_arrays([shape] * 4, dtype)
    out, lse = fa.attention_forward(q, k, v, causal=True)
    gradients = fa.attention_backward(dout, q, k, v, out, lse, causal=True)
    results = dict(zip(reference.NAMES, (out, lse, *gradients[:3]), strict=True))
    seconds = {
        "forward": _best(lambda: fa.attention_forward(q, k, v, causal=True)),
        "backward": _best(lambda: fa.attention_backward(dout, q, k, v, out, lse, causal=True)),
    }
    errors, differences = _errors(q, k, v, dout, dtype, results)
    usable = [info for info in fa.backends() if info.available and info.default]
    named = os.environ.get("FLASHATTN_BACKEND")
    backend = next(info for info in fa.backends() if info.name == (named or usable[0].name))
    result: dict[str, Any] = {
        "shape": list(shape),
        "dtype": arguments.dtype,
        "causal": True,
        "backend": backend.name,
        "device": backend.device,
        "threads": fa.get_num_threads(),
        "isa": _core.active_isa(),
        "seconds": seconds,
        "gflops": {
            name: flops(shape, True, name == "backward") / took * 1e-9
            for name, took in seconds.items()
        },
        "errors": errors,
        "right": all(error["max"] <= error["allowed"] for error in errors.values()),
        "memory": _memory(shape, arguments.dtype),
        "score_matrix_bytes": 4 * shape[1] ** 2 * shape[2],
        "picture": None,
    }
    if not arguments.no_picture:
        result["picture"] = _picture(arguments.picture, q, k, differences, result)
    return result


def _best(call: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _errors(
    q: Any, k: Any, v: Any, dout: Any, dtype: Any, results: dict[str, Any]
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Per result: the largest error against float64, that of plain code, and what is allowed."""
    errors: dict[str, dict[str, float]] = {}
    differences: dict[str, Any] = {name: [] for name in reference.NAMES}
    for head in progress(range(q.shape[2]), "float64 check"):
        one = slice(head, head + 1)
        arrays = tuple(x[:, :, one] for x in (q, k, v, dout))
        truth = reference.attention(arrays, {"causal": True})
        plain = reference.plain_errors(arrays, {"causal": True}, dtype, truth)
        for name in reference.NAMES:
            exact = getattr(truth, name)
            got = results[name][:, one] if name == "lse" else results[name][:, :, one]
            entry = errors.setdefault(name, {"max": 0.0, "plain": 0.0, "allowed": 0.0})
            for field, number in (
                ("max", reference.worst_error(got, exact)),
                ("plain", plain[name]),
                ("allowed", reference.allowed_error(name, exact, plain[name], got.dtype)),
            ):
                entry[field] = max(entry[field], number)
            differences[name].append(np.abs(np.asarray(got).astype(np.float64) - exact).ravel())
    return errors, differences


def _memory(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """Peak bytes above inputs and outputs, of this package and of the O(T^2) way."""
    request = {"shape": shape, "dtype": dtype, "causal": True, "passes": "both"}
    return {
        way: run_child("flashattn._cli.memory", {**request, "way": way})
        for way in ("flashattn", "naive")
    }


def _picture(path: Path, q: Any, k: Any, differences: dict[str, Any], result: Any) -> str | None:
    """Saves the picture; None without matplotlib or where the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    # With the identity as values, attention returns its weights: here, of 128 rows of one head.
    seqlen = min(128, q.shape[1])
    eye = np.eye(seqlen, dtype=np.float32).reshape(1, seqlen, 1, seqlen)
    rows, keys = (x[:, :seqlen, :1].astype(np.float32) for x in (q, k))
    weights = fa.attention(rows, keys, eye, causal=True)[0, :, 0]
    figure = Figure(figsize=(13, 4), layout="constrained")
    shown, errors, memory = figure.subplots(1, 3)
    shown.imshow(np.sqrt(weights), cmap="magma")
    shown.set(
        title=f"square root of the weights, head 0, {seqlen} rows", xlabel="key", ylabel="query"
    )
    for name in ("out", "dq", "dk", "dv"):
        sample = np.concatenate(differences[name])
        sample = sample[sample > 0]
        errors.hist(np.log10(sample), bins=80, histtype="step", label=name)
    errors.set(
        title=f"|{result['dtype']} - float64|", xlabel="log10 of the error", ylabel="elements"
    )
    errors.legend()
    bars = [result["memory"][way].get("extra_bytes", 0) / 1e6 for way in ("flashattn", "naive")]
    memory.bar(["flashattn", "O(T^2) way"], bars)
    memory.set(title="peak memory above inputs and outputs", ylabel="MB", yscale="symlog")
    try:
        figure.savefig(path, dpi=110)
    except OSError:
        return None
    return str(path)


def lines(result: dict[str, Any]) -> list[str]:
    """The demonstration as text."""
    batch, seqlen, heads, head_dim = result["shape"]
    text = [
        f"problem   batch {batch}, seqlen {seqlen}, {heads} heads of {head_dim}, "
        f"{result['dtype']}, causal",
        f"backend   {result['backend']}: {result['device']}",
    ]
    for name, seconds in result["seconds"].items():
        text.append(f"{name:<9} {seconds * 1e3:8.2f} ms  {result['gflops'][name]:7.1f} GFLOP/s")
    text.append("error against float64 (largest; that of plain code; allowed)")
    for name, error in result["errors"].items():
        verdict = "right" if error["max"] <= error["allowed"] else "WRONG"
        numbers = "  ".join(f"{error[field]:.2e}" for field in ("max", "plain", "allowed"))
        text.append(f"  {name:<4} {numbers}  {verdict}")
    text.append("peak memory above inputs and outputs, forward + backward")
    for way, label in (("flashattn", "here"), ("naive", "O(T^2)")):
        facts = result["memory"][way]
        amount = (
            f"{facts['extra_bytes'] / 1e6:9.1f} MB" if "extra_bytes" in facts else facts["error"]
        )
        text.append(f"  {label:<7} {amount}")
    text.append(f"  (the scores alone: {result['score_matrix_bytes'] / 1e6:.1f} MB)")
    if result["picture"]:
        text.append(f"picture   {result['picture']}")
    return text
