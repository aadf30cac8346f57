"""Calls with hostile arguments, from a seed, until the time is over.

    python tests/fuzz_binding.py --seconds 60 --seed 1          # prints what it met
    python tests/fuzz_binding.py --seed 1 --case 4711           # that call alone, and its outcome

A call gives a result of the right shape or raises one of the package's errors; a call of which
nothing was changed gives a result; and now and then a known call still has its known bits. A crash,
a hang of 60 s or any other exception ends the run and names the case.
"""

from __future__ import annotations

import argparse
import faulthandler
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import flashattn as fa
import fuzz_arguments as hostile
import numpy as np

ALLOWED = (TypeError, ValueError, NotImplementedError, MemoryError, OverflowError, BufferError)
# What numpy says of an array that was spoilt before and cannot be spoilt further.
NOT_MADE = (MemoryError, ValueError, IndexError, TypeError, RuntimeError)
BACKEND = "cpu"
MOST_MEMORY = 4 << 30  # bytes of address space


@dataclass
class Call:
    """A call that works, by parts that may be spoilt."""

    function: Callable[..., Any]
    arrays: dict[str, Any]
    integers: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Any:
        return self.function(**self.arrays, **self.integers, **self.numbers)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _options(rng: np.random.Generator, sizes: tuple[int, ...], call: Call) -> None:
    """Some of the options, as they should be."""
    b, h, tq, tk = sizes
    some: dict[str, Callable[[], Any]] = {
        "mask": lambda: (
            _normal(rng, b, 1, tq, tk) if rng.random() < 0.5 else np.ones((1, tk), bool)
        ),
        "alibi_slopes": lambda: _normal(rng, h),
        "sinks": lambda: _normal(rng, h),
    }
    for name, make in some.items():
        if rng.random() < 0.3:
            call.arrays[name] = make()
    if rng.random() < 0.3:
        call.integers["kv_lengths"] = rng.integers(0, tk + 1, b)
    if rng.random() < 0.3:
        call.integers["q_offset"] = rng.integers(-5, 50, b)
    numbers = {
        "scale": 0.5,
        "causal": True,
        "window": (3, 2),
        "softcap": 2.0,
        "k_offset": 4,
        "layout": "bshd",
    }
    call.numbers |= {name: x for name, x in numbers.items() if rng.random() < 0.3}
    if rng.random() < 0.3:
        call.numbers |= {"dropout_p": 0.25, "dropout_seed": 3, "dropout_offset": 9}


def _forward(rng: np.random.Generator) -> Call:
    b, h, tq, tk = (int(n) for n in rng.integers(1, 5, 4))
    tk *= int(rng.choice([1, 20]))
    d, dv = int(rng.integers(1, 20)), int(rng.integers(1, 20))
    arrays = {"query": (b, tq, 2 * h, d), "key": (b, tk, h, d), "value": (b, tk, h, dv)}
    call = Call(fa.attention_forward, {n: _normal(rng, *shape) for n, shape in arrays.items()})
    _options(rng, (b, 2 * h, tq, tk), call)
    if rng.random() < 0.2:
        call.arrays["out"] = np.empty((b, tq, 2 * h, dv), np.float32)
    call.numbers["backend"] = BACKEND
    return call


def _backward(rng: np.random.Generator) -> Call:
    call = _forward(rng)
    call.arrays.pop("out", None)
    out, lse = call.run()
    call.function = fa.attention_backward
    call.arrays |= {"dout": np.ones_like(out), "out": out, "lse": lse}
    if rng.random() < 0.5:
        call.arrays["dlse"] = np.ones_like(lse)
    return call


def _varlen(rng: np.random.Generator) -> Call:
    cu_q, cu_k = (np.cumsum([0, *rng.integers(0, 9, 3)]) for _ in range(2))
    sizes = {"query": (int(cu_q[-1]), 2), "key": (int(cu_k[-1]), 1), "value": (int(cu_k[-1]), 1)}
    call = Call(
        fa.attention_varlen,
        {name: _normal(rng, *size, 8) for name, size in sizes.items()},
        {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k},
        {"causal": True, "backend": BACKEND},
    )
    if rng.random() < 0.3:
        call.arrays["sinks"] = _normal(rng, 2)
    return call


def _kvcache(rng: np.random.Generator) -> Call:
    b, rows = int(rng.integers(1, 4)), 24
    lengths = rng.integers(0, rows - 3, b)
    paged = rng.random() < 0.5
    cache = (b * 3, 8, 1, 8) if paged else (b, rows, 1, 8)
    call = Call(
        fa.attention_kvcache,
        {
            "query": _normal(rng, b, 2, 2, 8),
            "k_cache": _normal(rng, *cache),
            "v_cache": _normal(rng, *cache),
            "k": _normal(rng, b, 2, 1, 8),
            "v": _normal(rng, b, 2, 1, 8),
        },
        {"cache_seqlens": lengths},
        {"backend": BACKEND, "rotary_interleaved": bool(rng.random() < 0.5)},
    )
    if paged:
        call.integers["block_table"] = rng.permutation(3 * b).reshape(b, 3)
    if rng.random() < 0.5:
        call.integers["leftpad"] = rng.integers(0, lengths + 1)
    if rng.random() < 0.5:
        call.arrays |= {"rotary_cos": _normal(rng, 40, 4), "rotary_sin": _normal(rng, 40, 4)}
    return call


def _merge(rng: np.random.Generator) -> Call:
    outs, lses = ([_normal(rng, *shape) for _ in range(3)] for shape in ((1, 4, 2, 8), (1, 2, 4)))

    def merge(a: Any, b: Any, c: Any, x: Any, y: Any, z: Any, **options: Any) -> Any:
        return fa.merge_attention([a, b, c], [x, y, z], **options)

    return Call(merge, dict(zip("abcxyz", [*outs, *lses], strict=True)), {}, {"layout": "bshd"})


def _dropout_mask(rng: np.random.Generator) -> Call:
    shape = tuple(int(n) for n in rng.integers(0, 5, 4))
    shard = fa.DropoutShard(9, 0, 9, 2, 9, 3)
    numbers = {"p": 0.5, "seed": 1, "dropout_offset": 2, "dropout_shard": shard}
    return Call(fa.dropout_mask, {}, {"shape": shape}, numbers)


MAKERS = (_forward, _forward, _backward, _varlen, _kvcache, _merge, _dropout_mask)


def make(seed: int, case: int) -> tuple[Call, int]:
    """The call of that number, and how many of its arguments were spoilt."""
    rng = np.random.default_rng([seed, case])
    call = MAKERS[int(rng.integers(len(MAKERS)))](rng)
    spoilt = int(rng.choice([0, 1, 1, 1, 2, 3]))
    for _ in range(spoilt):
        part = [p for p in (call.arrays, call.arrays, call.integers, call.numbers) if p]
        chosen = part[int(rng.integers(len(part)))]
        name = list(chosen)[int(rng.integers(len(chosen)))]
        if name == "backend":
            continue
        if chosen is call.arrays:
            chosen[name] = hostile.array(rng, chosen[name])
        elif chosen is call.integers:
            chosen[name] = hostile.integers(rng, chosen[name])
        else:
            chosen[name] = hostile.number(rng)
    return call, spoilt


def run_case(seed: int, case: int) -> str:
    """The name of what came of it."""
    try:
        call, spoilt = make(seed, case)
    except NOT_MADE:
        return "no call"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call.run()
    except ALLOWED as error:
        if spoilt == 0:
            raise
        return type(error).__name__
    return "a result"


def canary() -> bytes:
    rng = np.random.default_rng(0)
    query = _normal(rng, 2, 33, 4, 16)
    out, lse = fa.attention_forward(query, query, query, causal=True, backend=BACKEND)
    return bytes(out.tobytes() + lse.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int)
    given = parser.parse_args()
    if given.case is not None:
        print(run_case(given.seed, given.case))
        return
    if sys.platform == "linux":  # a copy of terabytes fails instead of taking the machine down
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    expected, end, met = canary(), time.monotonic() + given.seconds, Counter[str]()
    case = 0
    while time.monotonic() < end:
        # The last line of a run that dies says where.
        print(f"\rseed {given.seed} case {case}", end="", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(60, exit=True)
        met[run_case(given.seed, case)] += 1
        if case % 50 == 0 and canary() != expected:
            raise AssertionError("a call with known results has others now")
        case += 1
    faulthandler.cancel_dump_traceback_later()
    print(f"\n{case} calls of seed {given.seed}: {dict(met)}")


if __name__ == "__main__":
    faulthandler.enable()
    main()
