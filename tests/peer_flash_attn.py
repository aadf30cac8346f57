"""What the tests over flash-attention's grid share: upstream's inputs and options for a case, ours
for the oracle, and the comparison of results and gradients.

A case has the fields of upstream's parametrisation; those that a grid lacks are off.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import reference
import reference_packed
import torch
from tolerance import GRADIENT_FACTOR, assert_close
from torch_numbers import numbers
from yardstick import forward_yardstick, gradient_yardstick

SEED = 5
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
# Rows against keys, from one query to more queries than keys.
CROSS = [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256)]
CROSS += [(1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048)]
CAUSAL = [(1, 239), (3, 799), (127, 512), (127, 513), *CROSS[:5], (1023, 1024)]
FLAGS = (False, True)
# The axes that the grids of whole batches and of packed sequences begin with; each adds its sizes.
QKV_PACKED: dict[str, tuple[Any, ...]] = {
    "dtype": DTYPES,
    "deterministic": FLAGS,
    "alibi": FLAGS,
    "local": FLAGS,
    "causal": FLAGS,
    "dropout_p": (0.0, 0.17),
}
OUTPUT: dict[str, tuple[Any, ...]] = {
    "kvpacked": FLAGS,
    "dtype": DTYPES,
    "mha_type": ("mha", "mqa", "gqa"),
    "deterministic": FLAGS,
    "alibi": FLAGS,
    "local": FLAGS,
    "causal": FLAGS,
    "dropout_p": (0.0, 0.17),
    "softcap": (0.0, 50.0),
}
KV_HEADS = {"mha": 1, "gqa": 3, "mqa": 6}  # of six query heads, that many share a key head


def generator(case: SimpleNamespace) -> torch.Generator:
    """One sequence of random numbers a case."""
    return torch.Generator().manual_seed(int(case.d) + sum(ord(c) for c in str(case)))


def options(
    case: SimpleNamespace, shape: tuple[int, int], keys: int, random: torch.Generator
) -> dict[str, Any]:
    """Upstream's keywords; shape is (batch, heads) of the slopes."""
    given = vars(case)
    opts: dict[str, Any] = {"causal": given.get("causal", False)}
    if given.get("local"):
        left, right = torch.randint(0, keys, (2,), generator=random)
        opts["window_size"] = (int(left), int(right))
    if given.get("alibi"):
        opts["alibi_slopes"] = 0.3 * torch.rand(shape, generator=random)
    for name in ("dropout_p", "softcap"):
        if given.get(name):
            opts[name] = given[name]
    return opts


def ours(opts: dict[str, Any]) -> dict[str, Any]:
    """The oracle's options for upstream's, with the seed that the call will draw."""
    found = {n: x for n, x in opts.items() if n not in ("window_size", "alibi_slopes")}
    if "window_size" in opts:
        found["window"] = opts["window_size"]
    if "alibi_slopes" in opts:
        found["alibi_slopes"] = numbers(opts["alibi_slopes"])
    if opts.get("dropout_p"):
        torch.manual_seed(SEED)
        found["dropout_seed"] = int(torch.randint(0, 2**63 - 1, ()))
    return found


def randn(random: torch.Generator, dtype: Any, *shape: int, grad: bool = True) -> Any:
    return torch.randn(shape, generator=random).to(dtype).requires_grad_(grad)


def check_dropped(signed: Any, exact: reference.Result) -> None:
    """S_dmask: negative exactly where dropout dropped a weight that is there."""
    found = numbers(signed).astype(np.float32)
    there = exact.visible & (np.abs(found) > 0)
    np.testing.assert_array_equal((found < 0) & there, (exact.keep == 0) & there)


def check_dense(
    call: Callable[[], Any], inputs: tuple[Any, Any, Any], opts: dict[str, Any]
) -> None:
    """A call with return_attn_probs on (batch, seqlen, heads, dim): out, lse, dropped weights, and
    the gradients of `inputs`.
    """
    torch.manual_seed(SEED)
    out, lse, signed = call()
    options, arrays = ours(opts), tuple(map(numbers, inputs))
    exact, allowed = reference.attention(*arrays, **options), forward_yardstick(arrays, options)
    assert_close(numbers(out), exact.out, allowed["out"])
    assert_close(numbers(lse), exact.lse, allowed["lse"], name="lse")
    if opts.get("dropout_p"):
        check_dropped(signed, exact)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    found = torch.autograd.grad(out, inputs, dout)
    grads = reference.attention_backward(numbers(dout), *arrays, None, **options)
    limits = gradient_yardstick(numbers(dout), arrays, None, options)
    check_gradients(found, grads, limits)


def check_gradients(found: Any, grads: reference.Gradients, limits: dict[str, float]) -> None:
    for name, got in zip(("dq", "dk", "dv"), found, strict=True):
        exact = getattr(grads, name)
        assert_close(numbers(got), exact, limits[name], factor=GRADIENT_FACTOR, name=name)


def check_packed(
    call: Callable[[], Any],
    inputs: tuple[Any, Any, Any],
    starts: tuple[Any, Any],
    opts: dict[str, Any],
) -> None:
    """Likewise of (total, heads, dim): what is allowed is what the worst sequence on its own is.

    starts: cu_seqlens of queries and of keys, as lists.
    """
    torch.manual_seed(SEED)
    out, lse, _ = call()
    options, arrays = ours(opts), tuple(map(numbers, inputs))
    exact, exact_lse = reference_packed.attention_varlen(*arrays, *starts, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    found = torch.autograd.grad(out, inputs, dout)
    grads = reference_packed.attention_varlen_backward(numbers(dout), *arrays, *starts, **options)
    allowed = packed_yardstick(numbers(dout), arrays, starts, options)
    assert_close(numbers(out), exact, allowed["out"])
    assert_close(numbers(lse), exact_lse, allowed["lse"], name="lse")
    check_gradients(found, grads, allowed)


def packed_yardstick(
    dout: Any, arrays: tuple[Any, ...], starts: tuple[Any, Any], options: dict[str, Any]
) -> dict[str, float]:
    """The plain error of the worst sequence, each computed as a batch of one."""
    longest = reference_packed.longest_sequences(*starts)
    worst: dict[str, float] = {}
    for b in range(len(starts[0]) - 1):
        rows, keys = (slice(cu[b], cu[b + 1]) for cu in starts)
        one = (arrays[0][None, rows], arrays[1][None, keys], arrays[2][None, keys])
        own = reference_packed.sequence_options(options, b, arrays[0].shape[1], longest)
        found = forward_yardstick(one, own) | gradient_yardstick(dout[None, rows], one, None, own)
        worst = {name: max(error, worst.get(name, 0.0)) for name, error in found.items()}
    return worst
