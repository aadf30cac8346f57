"""The one comparison of the numeric tests: the rule of docs/tolerances.md.

    max|x - oracle| <= factor * max|naive - oracle| + 2 * max|(oracle + 0.3 - 0.3) - oracle|

factor is 2 for results and 3 for gradients; the last term is taken in x's dtype and says what
storing the result costs. Relies on numpy. It compares whole tensors: one number per output, no
per-test epsilon.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0


def distance(x: NDArray, oracle: NDArray) -> NDArray[np.float64]:
    """|x - oracle|: 0 for the same infinity or NaN in both, inf where one alone is finite."""
    with np.errstate(invalid="ignore"):
        distance = np.abs(x - oracle)
    same = (np.isnan(x) & np.isnan(oracle)) | ((x == oracle) & np.isinf(oracle))
    return np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance))


def storage_error(oracle: ArrayLike, dtype: np.dtype) -> float:
    """max|(o + 0.3 - 0.3) - o| over the finite elements, computed in `dtype`."""
    values = np.asarray(oracle, np.float64)
    o = values[np.isfinite(values)].astype(dtype)
    if o.size == 0:
        return 0.0
    third = np.asarray(0.3, dtype)
    moved = ((o + third).astype(dtype) - third).astype(dtype)
    return float(np.abs(moved.astype(np.float64) - o.astype(np.float64)).max())


def assert_close(
    x: ArrayLike,
    oracle: ArrayLike,
    yardstick: float,
    *,
    factor: float = FORWARD_FACTOR,
    name: str = "out",
) -> None:
    """Asserts the rule; the message names the worst element. `yardstick` is max|naive - oracle|."""
    got = np.asarray(x)
    exact = np.asarray(oracle, np.float64)
    assert got.shape == exact.shape, f"{name}: shape {got.shape}, expected {exact.shape}"
    assert np.isfinite(yardstick), f"{name}: the plain computation is no yardstick (not finite)"
    if exact.size == 0:
        return
    storage = storage_error(exact, got.dtype)
    allowed = factor * yardstick + 2.0 * storage
    error = distance(got.astype(np.float64), exact)
    worst = np.unravel_index(int(error.argmax()), error.shape)
    at = [int(i) for i in worst]
    assert error[worst] <= allowed, (
        f"{name}{at} = {got[worst]!r}, expected {exact[worst]!r}: "
        f"error {error[worst]:.3g} > allowed {allowed:.3g} = "
        f"{factor:g} x {yardstick:.3g} (plain {got.dtype}) + 2 x {storage:.3g} (storage);"
        f" {int((error > allowed).sum())} of {error.size} elements are over"
    )
