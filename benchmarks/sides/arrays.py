"""This package on numpy arrays, JAX, and MLX's CPU device."""

from __future__ import annotations

from typing import Any

from cells import threads_of

from sides.common import Call, random, sizes_of


def flashattn(cell: dict[str, Any]) -> Call:
    """The raw calls, whose backward takes the forward's results as torch's graph does."""
    import flashattn as fa

    fa.set_num_threads(threads_of(cell))
    q, k, v, dout = random(cell["dtype"], *sizes_of(cell).bshd())
    options: dict[str, Any] = {"causal": cell["causal"]}
    if "window" in cell:
        options["window"] = (cell["window"] - 1, 0)
    if cell["pass"] != "backward":
        return lambda: fa.attention(q, k, v, **options)
    out, lse = fa.attention_forward(q, k, v, **options)
    return lambda: fa.attention_backward(dout, q, k, v, out, lse, **options)


def jax(cell: dict[str, Any]) -> Call:
    """jax.nn.dot_product_attention, compiled; backward is the compiled vjp of kept residuals."""
    import jax
    import jax.numpy as jnp

    options: dict[str, Any] = {"is_causal": cell["causal"]}
    if "window" in cell:
        options["local_window_size"] = (cell["window"] - 1, 0)
    q, k, v, dout = (jnp.asarray(x) for x in random(cell["dtype"], *sizes_of(cell).bshd()))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, **options)

    if cell["pass"] != "backward":
        forward = jax.jit(attend)
        return lambda: forward(q, k, v).block_until_ready()
    _, pull = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v))(q, k, v)
    backward = jax.jit(lambda pull, dout: pull(dout))
    return lambda: jax.block_until_ready(backward(pull, dout))


def mlx(cell: dict[str, Any]) -> Call:
    """mx.fast.scaled_dot_product_attention, in (batch, heads, seqlen, dim)."""
    import mlx.core as mx
    import numpy as np

    if cell["pass"] == "backward":
        raise NotImplementedError("MLX computes forward and backward in one")
    if "window" in cell:
        raise NotImplementedError("the operator has no window")
    mx.set_default_device(mx.cpu)
    sizes = sizes_of(cell)
    arrays = random("float32", *sizes.bhsd())[:3]
    q, k, v = (mx.array(np.ascontiguousarray(x)).astype(getattr(mx, cell["dtype"])) for x in arrays)
    mx.eval(q, k, v)
    mask = "causal" if cell["causal"] else None
    scale = sizes.head_dim**-0.5

    def call() -> None:
        mx.eval(mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask))

    return call
