"""Test problems: a Case is a few numbers, build() turns it into arrays with the oracle's and the
yardstick's answers.

Answers are computed when first asked for and kept, so all targets of a case share them.
`check_forward` and `check_backward` are the body of most tests: run, compare every output by the
rule of tests/tolerance.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import reference
from numpy.typing import NDArray
from targets import Target
from tolerance import GRADIENT_FACTOR, assert_close
from yardstick import GRADIENTS, forward_yardstick, gradient_yardstick

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def _is_given(value: Any) -> bool:
    """Neither None nor False; 0 is a value."""
    return value is not None and value is not False


@dataclass(frozen=True)
class Case:
    """Sizes and options. Options that are arrays are named by kind and drawn in build()."""

    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    seqlen_q: int = 8
    seqlen_k: int = 8
    head_dim: int = 16
    value_dim: int | None = None
    dtype: str = "float32"
    causal: bool | str = False
    window: tuple[int, int] | None = None
    scale: float | None = None
    softcap: float | None = None
    q_offset: int | tuple[int, ...] | None = None
    k_offset: int | None = None
    kv_lengths: tuple[int, ...] | None = None
    mask: str | None = None  # bool, bool_keys, additive, additive_keys, holes
    alibi: str | None = None  # head, batch
    sinks: bool = False
    dropout_p: float | None = None
    magnitude: float = 1.0  # of query and key
    seed: int = field(default=0)

    @property
    def id(self) -> str:
        sizes = (
            f"{self.batch}x{self.heads}:{self.kv_heads}x{self.seqlen_q}x{self.seqlen_k}"
            f"x{self.head_dim}:{self.value_dim or self.head_dim}"
        )
        names = (
            "causal",
            "window",
            "scale",
            "softcap",
            "q_offset",
            "k_offset",
            "kv_lengths",
            "mask",
            "alibi",
            "sinks",
            "dropout_p",
        )
        said = [f"{n}={getattr(self, n)}" for n in names if _is_given(getattr(self, n))]
        return ",".join([sizes, self.dtype, *said]).replace(" ", "")


class Problem:
    """A case with its arrays. All of them are C-contiguous, in layout bshd."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = np.random.default_rng(case.seed + 1)
        self.dtype = DTYPES[case.dtype]
        value_dim = case.value_dim or case.head_dim
        b, h, hk, tq, tk = case.batch, case.heads, case.kv_heads, case.seqlen_q, case.seqlen_k
        self.query = self._normal(b, tq, h, case.head_dim, size=case.magnitude)
        self.key = self._normal(b, tk, hk, case.head_dim, size=case.magnitude)
        self.value = self._normal(b, tk, hk, value_dim)
        self.dout = self._normal(b, tq, h, value_dim)
        self.dlse = self.rng.standard_normal((b, h, tq)).astype(np.float32)
        self.options = self._options()

    def _normal(self, *shape: int, size: float = 1.0) -> NDArray[Any]:
        return (size * self.rng.standard_normal(shape)).astype(self.dtype)

    def _options(self) -> dict[str, Any]:
        case = self.case
        plain = ("causal", "window", "scale", "softcap", "k_offset", "dropout_p")
        values = {n: getattr(case, n) for n in plain}
        opts = {n: x for n, x in values.items() if _is_given(x)}
        if case.q_offset is not None:
            one = isinstance(case.q_offset, int)
            opts["q_offset"] = case.q_offset if one else np.array(case.q_offset, np.int64)
        if case.kv_lengths is not None:
            opts["kv_lengths"] = np.array(case.kv_lengths, np.int32)
        if case.mask is not None:
            opts["mask"] = self._mask(case.mask)
        if case.alibi is not None:
            shape = (case.heads,) if case.alibi == "head" else (case.batch, case.heads)
            opts["alibi_slopes"] = self.rng.uniform(0.01, 0.5, shape).astype(np.float32)
        if case.sinks:
            opts["sinks"] = self.rng.standard_normal(case.heads).astype(np.float32)
        if case.dropout_p:
            opts["dropout_seed"] = 0x1234_5678_9ABC + case.seed
        return opts

    def _mask(self, kind: str) -> NDArray[Any]:
        case = self.case
        full = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)
        if kind == "bool":
            return self.rng.random(full) < 0.7
        if kind == "bool_keys":
            return self.rng.random((case.batch, 1, 1, case.seqlen_k)) < 0.7
        if kind == "additive_keys":
            return self.rng.standard_normal((1, case.heads, 1, case.seqlen_k)).astype(np.float32)
        values = self.rng.standard_normal(full).astype(np.float32)
        return (
            np.where(self.rng.random(full) < 0.3, np.float32(-np.inf), values)
            if kind == "holes"
            else values
        )

    @property
    def inputs(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        return self.query, self.key, self.value

    @cached_property
    def oracle(self) -> reference.Result:
        return reference.attention(*self.inputs, **self.options)

    @cached_property
    def oracle_gradients(self) -> reference.Gradients:
        return reference.attention_backward(self.dout, *self.inputs, self.dlse, **self.options)

    @cached_property
    def yardstick(self) -> dict[str, float]:
        return forward_yardstick(self.inputs, self.options)

    @cached_property
    def gradient_yardstick(self) -> dict[str, float]:
        return gradient_yardstick(self.dout, self.inputs, self.dlse, self.options)


@lru_cache(maxsize=2000)
def build(case: Case) -> Problem:
    return Problem(case)


def check_result(problem: Problem, out: Any, lse: Any) -> None:
    assert_close(out, problem.oracle.out, problem.yardstick["out"])
    assert_close(lse, problem.oracle.lse, problem.yardstick["lse"], name="lse")


def check_forward(target: Target, case: Case) -> tuple[Any, Any] | None:
    """Forward against the oracle; None when the backend lacks an option and said so."""
    problem = build(case)
    if target.refuses(lambda: target.forward(*problem.inputs, **problem.options), problem.options):
        return None
    out, lse = target.forward(*problem.inputs, **problem.options)
    assert out.dtype == problem.dtype
    assert lse.dtype == np.float32
    check_result(problem, out, lse)
    return out, lse


def check_gradients(problem: Problem, grads: Any) -> None:
    """Every gradient by the rule, and None exactly where there is no such input."""
    for name in GRADIENTS:
        expected = getattr(problem.oracle_gradients, name)
        got = getattr(grads, name)
        if expected is None:
            assert got is None, f"{name} for an input that was not given"
            continue
        yardstick = problem.gradient_yardstick[name]
        assert_close(got, expected, yardstick, factor=GRADIENT_FACTOR, name=name)


def check_backward(target: Target, case: Case) -> Any:
    """Forward, backward with dlse, every gradient against the oracle; None as for check_forward."""
    problem = build(case)
    if target.refuses(lambda: target.forward(*problem.inputs, **problem.options), problem.options):
        return None
    out, lse = target.forward(*problem.inputs, **problem.options)
    grads = target.backward(
        problem.dout, *problem.inputs, out, lse, dlse=problem.dlse, **problem.options
    )
    check_gradients(problem, grads)
    return grads


def check_arrays(target: Target, query: Any, key: Any, value: Any, **opts: Any) -> tuple[Any, Any]:
    """Forward of given arrays (layout bshd) against the oracle; returns out and lse."""
    exact = reference.attention(query, key, value, **opts)
    yardstick = forward_yardstick((query, key, value), opts)
    out, lse = target.forward(query, key, value, **opts)
    assert_close(out, exact.out, yardstick["out"])
    assert_close(lse, exact.lse, yardstick["lse"], name="lse")
    return out, lse
