"""torch tensors in the tests: making them, their values as numpy has them, and the tolerance rule
for results whose oracle is torch's own attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from targets import NOT_IMPLEMENTED, chosen_backend
from tolerance import GRADIENT_FACTOR, assert_close
from yardstick import forward_yardstick, gradient_yardstick

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def tensors(
    *shapes: tuple[int, ...], dtype: Any = torch.float32, grad: bool = False, seed: int = 2
) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in made]


def numbers(x: Any) -> Any:
    """The tensor's values as numpy has them."""
    if x.dtype == torch.bfloat16:
        return x.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.detach().numpy()


def bshd(x: Any) -> Any:
    """(batch, heads, seqlen, dim) as the oracle wants it."""
    return np.ascontiguousarray(numbers(x).swapaxes(1, 2))


def missing(*options: str) -> bool:
    """Whether the backend of calls that name none lacks one of the options."""
    return bool(set(options) & NOT_IMPLEMENTED[chosen_backend()])


def refused(call: Callable[[], Any], *options: str) -> bool:
    """True where the backend lacks one of the options, after asserting that the call says so."""
    if not missing(*options):
        return False
    with pytest.raises(NotImplementedError, match="|".join(options)):
        call()
    return True


def check_bhsd(out: Any, exact: Any, inputs: list[Any], opts: dict[str, Any]) -> None:
    """out of (batch, heads, seqlen, dim) inputs against `exact`, by the rule."""
    allowed = forward_yardstick(tuple(map(bshd, inputs)), opts)["out"]
    assert_close(bshd(out), bshd(exact), allowed)


def check_gradients_bhsd(
    got: list[Any], exact: list[Any], dout: Any, inputs: list[Any], opts: dict[str, Any]
) -> None:
    """dq, dk, dv likewise."""
    allowed = gradient_yardstick(bshd(dout), tuple(map(bshd, inputs)), None, opts)
    for name, ours, theirs in zip(("dq", "dk", "dv"), got, exact, strict=True):
        assert ours.dtype == inputs[0].dtype
        one, other = bshd(ours), bshd(theirs)
        assert_close(one, other, allowed[name], factor=GRADIENT_FACTOR, name=name)
