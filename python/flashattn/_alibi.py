"""alibi_slopes: the slopes that the paper on ALiBi chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashattn._options import sizes

if TYPE_CHECKING:
    from numpy.typing import NDArray


def alibi_slopes(num_heads: int) -> NDArray[np.float32]:
    """Slopes for the option `alibi_slopes` (Press, Smith, Lewis: "Train Short, Test Long", 2022).

    For a power of two n they are 2 ** (-8 / n), 2 ** (-16 / n), ..., 2 ** -8. For another count
    they are those of the next power of two below, followed by every second one of twice that
    power.

    Args:
        num_heads: query heads, at least 1.

    Returns:
        float32 (num_heads,).

    Raises:
        ValueError: num_heads below 1.
        TypeError: num_heads is not an int.

    Example:
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    (count,) = sizes("alibi_slopes", "num_heads", (num_heads,), 1, least=1)
    power = 1 << (count.bit_length() - 1)
    own = -8.0 * np.arange(1, power + 1) / power
    between = -4.0 * np.arange(1, 2 * power, 2) / power
    exponents = np.concatenate([own, between[: count - power]])
    return np.asarray(np.exp2(exponents), np.float32)
