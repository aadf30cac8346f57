"""What the numeric tests run on: every available backend, and for the CPU every instruction set of
this machine.

A Target is one way to compute: `cpu-x86-64-v3`, `metal-apple-random`, ... tests ask it and never
call the package for numbers themselves. FLASHATTN_TEST_BACKENDS names the backends to test (comma
separated; default: every available one that is chosen without being named). The name `oracle`
stands for tests/reference.py itself rounded to the call's dtype: the suite must pass on it, which
is how the tests are tested.

For the simulated Metal device FLASHATTN_TEST_SIMULATED lists fragment map / schedule pairs, e.g.
"row/fifo,apple/random,random:3/priority"; without it the METAL_SIM_* environment holds for the
whole run.

An option that a backend lacks stands in NOT_IMPLEMENTED: there the call must raise
NotImplementedError and name the option. Implementing it makes those tests fail until its row here
is deleted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
import reference_packed

NOT_IMPLEMENTED: dict[str, frozenset[str]] = {
    "cpu": frozenset(),
    "metal": frozenset(),
    "oracle": frozenset(),
}
# Functions of the public API that are not there yet: they are absent, or raise NotImplementedError.
NOT_IMPLEMENTED_FUNCTIONS: frozenset[str] = frozenset()
_TAKE_BACKEND = {"attention_varlen", "attention_varlen_backward", "attention_kvcache"}
MAX_HEAD_DIM = {"cpu": 512, "metal": 256, "oracle": 512}


def _used(options: dict[str, Any]) -> set[str]:
    """The options that ask for something: a value other than the default."""
    off = {"softcap": 0.0, "dropout_p": 0.0}
    return {n for n, x in options.items() if x is not None and not (n in off and x == off[n])}


@dataclass(frozen=True)
class Target:
    backend: str
    isa: str | None = None
    simulated: tuple[str, str] | None = None  # fragment map, schedule
    missing: frozenset[str] = field(default=frozenset())

    @property
    def id(self) -> str:
        parts = [self.backend, self.isa, *(self.simulated or ())]
        return "-".join(p for p in parts if p)

    def activate(self) -> None:
        """Makes the process compute this way until the next activate()."""
        if self.isa is not None:
            from flashattn import _core

            _core.set_isa(self.isa)
        if self.simulated is not None:
            from flashattn import _core

            for name, value in zip(("map", "schedule"), self.simulated, strict=True):
                _core.set_simulated_metal(name, value)
            _core.forget_lane_maps()

    @property
    def max_head_dim(self) -> int:
        return MAX_HEAD_DIM[self.backend]

    def lacks(self, options: dict[str, Any]) -> set[str]:
        return _used(options) & self.missing

    def forward(self, query: Any, key: Any, value: Any, **opts: Any) -> tuple[Any, Any]:
        """out, lse."""
        if self.backend == "oracle":
            return _oracle_forward(query, key, value, **opts)
        import flashattn as fa

        return fa.attention_forward(query, key, value, backend=self.backend, **opts)

    def backward(
        self, dout: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, **opts: Any
    ) -> Any:
        """AttentionGradients; `dlse` is one of the options here."""
        if self.backend == "oracle":
            return _oracle_backward(dout, query, key, value, **opts)
        import flashattn as fa

        return fa.attention_backward(
            dout, query, key, value, out, lse, backend=self.backend, **opts
        )

    def function(self, name: str) -> Callable[..., Any] | None:
        """A public function beyond the two above, or None after asserting it is not there."""
        if self.backend == "oracle":
            return _ORACLE_FUNCTIONS[name]
        if name in self.missing:
            return None
        import flashattn as fa

        if name in NOT_IMPLEMENTED_FUNCTIONS:
            assert not hasattr(fa, name), f"flashattn.{name} is there: delete it from targets.py"
            return None
        found: Callable[..., Any] = getattr(fa, name)
        return partial(found, backend=self.backend) if name in _TAKE_BACKEND else found

    def refuses(self, call: Callable[[], Any], options: dict[str, Any]) -> bool:
        """True when `options` use something this backend lacks, after asserting that `call` says
        so.
        """
        lacking = self.lacks(options)
        if not lacking:
            return False
        with pytest.raises(NotImplementedError, match="|".join(sorted(lacking))):
            call()
        return True


def _from_bhsd(layout: str, *arrays: Any) -> list[Any]:
    if layout == "bshd":
        return list(arrays)
    return [np.asarray(x).transpose(0, 2, 1, 3) for x in arrays]


def _oracle_forward(
    query: Any, key: Any, value: Any, layout: str = "bshd", out: Any = None, **opts: Any
) -> tuple[Any, Any]:
    q, k, v = _from_bhsd(layout, query, key, value)
    result = reference.attention(q, k, v, **opts)
    (o,) = _from_bhsd(layout, result.out)
    o = np.ascontiguousarray(o.astype(np.asarray(query).dtype))
    if out is not None:
        out[...] = o
        o = out
    return o, result.lse.astype(np.float32)


def _oracle_backward(
    dout: Any, query: Any, key: Any, value: Any, layout: str = "bshd", **opts: Any
) -> reference.Gradients:
    do, q, k, v = _from_bhsd(layout, dout, query, key, value)
    grads = reference.attention_backward(do, q, k, v, **opts)
    dtype = np.asarray(query).dtype
    dq, dk, dv = (np.ascontiguousarray(x.astype(dtype)) for x in (grads.dq, grads.dk, grads.dv))
    wide = np.float64 if np.asarray(opts.get("mask")).dtype == np.float64 else np.float32
    small = (
        None if x is None else x.astype(dtype)
        for x, dtype in (
            (grads.dmask, wide),
            (grads.dalibi_slopes, np.float32),
            (grads.dsinks, np.float32),
        )
    )
    return reference.Gradients(*_from_bhsd(layout, dq, dk, dv), *small)


def _oracle_varlen(query: Any, *rest: Any, **opts: Any) -> tuple[Any, Any]:
    out, lse = reference_packed.attention_varlen(query, *rest, **opts)
    return out.astype(np.asarray(query).dtype), lse.astype(np.float32)


def _oracle_varlen_backward(
    dout: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, *cu_seqlens: Any, **opts: Any
) -> reference.Gradients:
    return reference_packed.attention_varlen_backward(dout, query, key, value, *cu_seqlens, **opts)


def _oracle_kvcache(query: Any, k_cache: Any, v_cache: Any, **opts: Any) -> tuple[Any, Any]:
    """Appends in place, as the package does."""
    result, keys, values = reference_packed.attention_kvcache(query, k_cache, v_cache, **opts)
    k_cache[...], v_cache[...] = keys.astype(k_cache.dtype), values.astype(v_cache.dtype)
    return result.out.astype(np.asarray(query).dtype), result.lse.astype(np.float32)


def _oracle_merge(outs: Any, lses: Any) -> tuple[Any, Any]:
    out, lse = reference_packed.merge_attention(outs, lses)
    return out.astype(np.asarray(outs[0]).dtype), lse.astype(np.float32)


_ORACLE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention_varlen": _oracle_varlen,
    "attention_varlen_backward": _oracle_varlen_backward,
    "attention_kvcache": _oracle_kvcache,
    "merge_attention": _oracle_merge,
    "dropout_mask": lambda shape, p, seed, **opts: reference.dropout_mask(shape, p, seed, **opts),
    "alibi_slopes": reference_packed.alibi_slopes,
}


def _cpu_targets() -> list[Target]:
    from flashattn import _core

    missing = NOT_IMPLEMENTED["cpu"]
    return [Target("cpu", isa=name, missing=missing) for name in _core.supported_isas()]


def _metal_targets() -> list[Target]:
    missing = NOT_IMPLEMENTED["metal"]
    pairs = [p for p in os.environ.get("FLASHATTN_TEST_SIMULATED", "").split(",") if p]
    if not pairs:
        return [Target("metal", missing=missing)]
    split = (pair.partition("/") for pair in pairs)
    return [Target("metal", simulated=(m, s or "fifo"), missing=missing) for m, _, s in split]


def chosen_backend() -> str:
    """The backend of calls that name none."""
    import flashattn as fa

    named = os.environ.get("FLASHATTN_BACKEND")
    return named or next(b.name for b in fa.backends() if b.available and b.default)


def chosen_is_simulated() -> bool:
    """Whether those calls run on the simulated device: right, and a thousand times slower."""
    from flashattn import _core

    return chosen_backend() == "metal" and hasattr(_core, "set_simulated_metal")


def all_targets() -> list[Target]:
    """The targets of this run; naming a backend that is not available is an error."""
    named = [n for n in os.environ.get("FLASHATTN_TEST_BACKENDS", "").split(",") if n]
    if named == ["oracle"]:
        return [Target("oracle")]
    import flashattn as fa

    available = {b.name: b for b in fa.backends() if b.available}
    targets: list[Target] = []
    for name in named or [n for n, b in available.items() if b.default]:
        if name == "oracle":
            targets.append(Target("oracle"))
        elif name not in available:
            raise pytest.UsageError(f"FLASHATTN_TEST_BACKENDS: {name} is not available here")
        else:
            targets += _cpu_targets() if name == "cpu" else _metal_targets()
    return targets
