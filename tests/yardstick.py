"""How far plain same-dtype attention is from the oracle: what the tolerance rule measures with.

The largest error of a small output is a matter of luck: a single number may come out exact. So a
small problem is measured on copies of itself whose inputs are varied by 5 %, each against its own
oracle, and the largest error counts: 32 copies, or as many as 2^24 multiply-adds pay for. Gradients
are measured on both plain ways to get them (tests/naive.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import reference
from naive import Naive
from numpy.typing import NDArray
from tolerance import distance

Arrays = tuple[NDArray[Any], ...]
WORK = 1 << 24  # multiply-adds of all copies together
MOST_COPIES = 32
GRADIENTS = ("dq", "dk", "dv", "dmask", "dalibi_slopes", "dsinks")


def copies(arrays: Arrays) -> Iterator[Arrays]:
    """Arrays that end with query, key and value, and then varied ones."""
    yield arrays
    query, key, value = arrays[-3:]
    work = query.size * key.shape[1] + query[..., 0].size * value.shape[1] * value.shape[3]
    rng = np.random.default_rng(work)
    for _ in range(min(MOST_COPIES, WORK // max(work, 1)) - 1):
        yield tuple(
            (x.astype(np.float32) * (1 + 0.05 * rng.standard_normal(x.shape))).astype(x.dtype)
            for x in arrays
        )


def _largest(x: Any, oracle: Any) -> float:
    return float(distance(np.asarray(x, np.float64), np.asarray(oracle)).max(initial=0.0))


def forward_yardstick(inputs: Arrays, opts: dict[str, Any]) -> dict[str, float]:
    """The plain error of out and lse for problems like this one."""
    found = {"out": 0.0, "lse": 0.0}
    for copy in copies(inputs):
        exact = reference.attention(*copy, **opts)
        out, lse = Naive(*copy, **opts).forward()
        found["out"] = max(found["out"], _largest(out, exact.out))
        found["lse"] = max(found["lse"], _largest(lse, exact.lse))
    return found


def gradient_yardstick(
    dout: NDArray[Any], inputs: Arrays, dlse: NDArray[Any] | None, opts: dict[str, Any]
) -> dict[str, float]:
    """The plain error of every gradient that there is for problems like this one."""
    found: dict[str, float] = {}
    for varied_dout, *copy in copies((dout, *inputs)):
        exact = reference.attention_backward(varied_dout, *copy, dlse, **opts)
        stored = reference.attention(*copy, **opts)
        naive = Naive(*copy, **opts)
        for plain in (
            naive.backward(varied_dout, dlse),
            naive.backward_from_stored(stored.out, stored.lse, varied_dout, dlse),
        ):
            for name in GRADIENTS:
                gradient = getattr(exact, name)
                if gradient is not None:
                    error = _largest(getattr(plain, name), gradient)
                    found[name] = max(found.get(name, 0.0), error)
    return found
