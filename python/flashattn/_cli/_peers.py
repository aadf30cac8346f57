"""Attention as each of the other frameworks has it, for `bench`: what is timed there.

Every side gets its own favourite layout and its best call for a CPU. What a framework does not have
raises NotImplementedError with the reason, which becomes a gap in the table. Nothing here imports a
framework before its process has been told how many processors it may use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashattn._cli.problems import random_arrays

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[[], object]


class Side(NamedTuple):
    """One framework.

    module: what must be importable. prepare(threads): imports it and gives its version. call(cell):
    what is timed. numpy(result, cell): what the call gives as (batch, seqlen, heads, dim) arrays,
    out or dq, dk and dv, for the tests.
    """

    module: str
    prepare: Callable[[int], str]
    call: Callable[[dict[str, Any]], Call]
    numpy: Callable[[Any, dict[str, Any]], list[Any]]


class _Both:
    """A call of two passes that cannot be taken apart: `less` is the one that is not asked for."""

    def __init__(self, both: Call, less: Call) -> None:
        self.both, self.less = both, less

    def __call__(self) -> object:
        return self.both()


def _inputs(cell: dict[str, Any]) -> list[Any]:
    """query, key, value and dout, (batch, seqlen, heads, dim) in float32."""
    return random_arrays([tuple(cell["shape"])] * 4, "float32")


def _prepare_torch(threads: int) -> str:
    import torch

    torch.set_num_threads(threads)
    return str(torch.__version__)


def _torch_call(cell: dict[str, Any]) -> Call:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    dtype = getattr(torch, cell["dtype"])
    # The same memory as ours, (batch, seqlen, heads, dim), seen in torch's axis order.
    q, k, v, dout = (torch.from_numpy(x).to(dtype).transpose(1, 2) for x in _inputs(cell))
    causal = cell["causal"]
    if not cell["backward"]:
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=causal)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(q, k, v, is_causal=causal)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _torch_numpy(result: Any, cell: dict[str, Any]) -> list[Any]:
    tensors = result if cell["backward"] else [result]
    return [x.detach().transpose(1, 2).numpy() for x in tensors]


def _prepare_jax(threads: int) -> str:
    import jax

    jax.config.update("jax_platforms", "cpu")
    return str(jax.__version__)


def _jax_call(cell: dict[str, Any]) -> Call:
    """jax.nn.dot_product_attention, compiled; backward with what the forward pass has kept."""
    import jax

    q, k, v, dout = (jax.numpy.asarray(x, cell["dtype"]) for x in _inputs(cell))
    causal = cell["causal"]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal)

    if not cell["backward"]:
        compiled = jax.jit(attend)
        return lambda: compiled(q, k, v).block_until_ready()
    kept = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v)[1])(q, k, v)
    back = jax.jit(lambda kept, dout: kept(dout))
    return lambda: jax.block_until_ready(back(kept, dout))


def _jax_numpy(result: Any, cell: dict[str, Any]) -> list[Any]:
    return [np.asarray(x) for x in (result if cell["backward"] else [result])]


def _prepare_mlx(threads: int) -> str:
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    return str(mx.__version__)


def _mlx_call(cell: dict[str, Any]) -> Call:
    """mx.fast's function; a gradient there is both passes, so the forward pass is taken off."""
    import mlx.core as mx

    dtype = getattr(mx, cell["dtype"])
    q, k, v, dout = (mx.array(x).astype(dtype).swapaxes(1, 2) for x in _inputs(cell))
    mx.eval(q, k, v, dout)
    mask = "causal" if cell["causal"] else None
    scale = cell["shape"][3] ** -0.5

    def attend(q: Any, k: Any, v: Any) -> Any:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

    def forward() -> list[Any]:
        out = attend(q, k, v)
        mx.eval(out)
        return [out]

    def both() -> Any:
        results = mx.vjp(attend, [q, k, v], [dout])
        mx.eval(results)
        return results[1]

    return _Both(both, forward) if cell["backward"] else forward


def _mlx_numpy(result: Any, cell: dict[str, Any]) -> list[Any]:
    return [np.array(x).swapaxes(1, 2) for x in result]


_threads_of_sessions: dict[str, int] = {}


def _prepare_onnxruntime(threads: int) -> str:
    import onnxruntime

    _threads_of_sessions["onnxruntime"] = threads
    return str(onnxruntime.__version__)


def _onnxruntime_call(cell: dict[str, Any]) -> Call:
    """MultiHeadAttention of com.microsoft: forward, float32."""
    import onnxruntime

    try:
        from onnx import TensorProto, helper
    except ImportError:
        raise NotImplementedError("the package onnx, which makes its model, is missing") from None
    if cell["backward"] or cell["dtype"] != "float32":
        raise NotImplementedError("no such kernel on the CPU")
    batch, seqlen, heads, head_dim = cell["shape"]
    shape = (batch, seqlen, heads * head_dim)
    feeds = dict(zip("qkv", (x.reshape(shape) for x in _inputs(cell)), strict=False))
    node = helper.make_node(
        "MultiHeadAttention",
        list(feeds),
        ["out"],
        domain="com.microsoft",
        num_heads=heads,
        unidirectional=int(cell["causal"]),
    )
    tensor = helper.make_tensor_value_info
    model = helper.make_model(
        helper.make_graph(
            [node],
            "attention",
            [tensor(name, TensorProto.FLOAT, shape) for name in feeds],
            [tensor("out", TensorProto.FLOAT, shape)],
        ),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _threads_of_sessions["onnxruntime"]
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    binding.bind_output("out")

    def run() -> Any:
        session.run_with_iobinding(binding)
        return binding

    return run


def _onnxruntime_numpy(result: Any, cell: dict[str, Any]) -> list[Any]:
    return [result.copy_outputs_to_cpu()[0].reshape(cell["shape"])]


SIDES = {
    "torch": Side("torch", _prepare_torch, _torch_call, _torch_numpy),
    "jax": Side("jax", _prepare_jax, _jax_call, _jax_numpy),
    "mlx": Side("mlx", _prepare_mlx, _mlx_call, _mlx_numpy),
    "onnxruntime": Side("onnxruntime", _prepare_onnxruntime, _onnxruntime_call, _onnxruntime_numpy),
}
