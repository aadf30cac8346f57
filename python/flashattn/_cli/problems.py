"""Random problems for the commands: standard normal arrays in a named dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


def numpy_dtype(name: str) -> Any:
    """The dtype of float32, float16 or bfloat16; None where ml_dtypes is needed and missing."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        return None
    return np.dtype(ml_dtypes.bfloat16)


def random_arrays(
    shapes: list[tuple[int, ...]], dtype: Any, seed: int = 0
) -> list[np.ndarray[Any, np.dtype[Any]]]:
    """One array per shape."""
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def flops(shape: Sequence[int], causal: bool, backward: bool) -> float:
    """Floating-point operations of attention on (batch, seqlen, heads, head_dim).

    4 B H T^2 D forward and 10 B H T^2 D backward, half of it under causal, as the field counts.
    """
    batch, seqlen, heads, head_dim = shape
    return (10 if backward else 4) * batch * heads * seqlen**2 * head_dim * (0.5 if causal else 1)
