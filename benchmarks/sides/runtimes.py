"""Inference runtimes: OpenVINO and ONNX Runtime, forward and decode.

ONNX Runtime is there twice: with its own fused operators, and with the standard's Attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from cells import threads_of

from sides.common import Call, random, sizes_of


def _refuse_windows(cell: dict[str, Any]) -> None:
    if "window" in cell:
        raise NotImplementedError("the operator has no window")


def openvino(cell: dict[str, Any]) -> Call:
    """Runs opset 13's ScaledDotProductAttention, in (batch, heads, seqlen, dim)."""
    import openvino as ov
    from openvino import opset13

    _refuse_windows(cell)
    sizes = sizes_of(cell)
    if cell["pass"] == "backward" or cell["dtype"] == "float16":
        raise NotImplementedError("OpenVINO has no such kernel on the CPU")
    if sizes.is_grouped:
        raise NotImplementedError("the operator has no grouped heads")
    shapes = sizes.bhsd()[:3]
    kind = {"float32": ov.Type.f32, "bfloat16": ov.Type.bf16}[cell["dtype"]]
    inputs = [opset13.parameter(list(shape), kind) for shape in shapes]
    node = opset13.scaled_dot_product_attention(*inputs, causal=cell["causal"])
    compiled = ov.Core().compile_model(
        ov.Model([node], inputs),
        "CPU",
        {
            "INFERENCE_NUM_THREADS": threads_of(cell),
            "INFERENCE_PRECISION_HINT": "f32" if cell["dtype"] == "float32" else "bf16",
        },
    )
    request = compiled.create_infer_request()
    for index, x in enumerate(random(cell["dtype"], *shapes)):
        tensor = ov.Tensor(kind, ov.Shape(list(x.shape)))
        bits = np.uint16 if cell["dtype"] == "bfloat16" else np.float32
        np.frombuffer(tensor.data, bits)[...] = x.view(bits).ravel()
        request.set_input_tensor(index, tensor)
    infer: Call = request.infer
    return infer


def onnxruntime(cell: dict[str, Any]) -> Call:
    """com.microsoft MultiHeadAttention; GroupQueryAttention for decode. float32 only."""
    _refuse_windows(cell)
    if cell["pass"] == "backward" or cell["dtype"] != "float32":
        raise NotImplementedError("ONNX Runtime has no such kernel on the CPU")
    return _decode(cell) if cell["pass"] == "decode" else _multi_head(cell)


def _decode(cell: dict[str, Any]) -> Call:
    heads, kv_heads, seqlen, head_dim = cell["shape"]
    past = seqlen - 1
    q, k, v, past_k, past_v = random(
        "float32",
        (1, 1, heads * head_dim),
        *[(1, 1, kv_heads * head_dim)] * 2,
        *[(1, kv_heads, past, head_dim)] * 2,
    )
    # The cache has room for the new key, which the operator appends in place.
    cache = [np.concatenate([x, x[:, :, :1]], axis=2) for x in (past_k, past_v)]
    feeds = {"q": q, "k": k, "v": v, "past_k": cache[0], "past_v": cache[1]}
    feeds |= {"lengths": np.array([past], np.int32), "total": np.array([seqlen], np.int32)}
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads}
    outputs = ["out", "present_k", "present_v"]
    return _session(cell, feeds, outputs, "GroupQueryAttention", "com.microsoft", attributes)


def _multi_head(cell: dict[str, Any]) -> Call:
    sizes = sizes_of(cell)
    if sizes.is_grouped:
        raise NotImplementedError("the operator has no grouped heads")
    batch, heads, seqlen, head_dim = cell["shape"]
    q, k, v = random("float32", *[(batch, seqlen, heads * head_dim)] * 3)
    attributes = {"num_heads": heads, "unidirectional": int(cell["causal"])}
    feeds = {"q": q, "k": k, "v": v}
    return _session(cell, feeds, ["out"], "MultiHeadAttention", "com.microsoft", attributes)


def onnx_attention(cell: dict[str, Any]) -> Call:
    """Attention of the standard's opset 23, in (batch, heads, seqlen, dim)."""
    _refuse_windows(cell)
    if cell["pass"] == "backward" or cell["dtype"] == "bfloat16":
        raise NotImplementedError("ONNX Runtime has no such kernel on the CPU")
    q, k, v = random(cell["dtype"], *sizes_of(cell).bhsd()[:3])
    attributes = {"is_causal": int(cell["causal"])}
    return _session(cell, {"q": q, "k": k, "v": v}, ["out"], "Attention", "", attributes)


def _session(
    cell: dict[str, Any],
    feeds: dict[str, Any],
    outputs: list[str],
    operator: str,
    domain: str,
    attributes: dict[str, int],
) -> Call:
    """A model of one node; outputs named present_* are appended to the inputs past_*, in place."""
    import onnxruntime
    from onnx import helper

    node = helper.make_node(operator, list(feeds), outputs, domain=domain, **attributes)
    kinds = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in feeds.items()}
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(n, kinds[n], x.shape) for n, x in feeds.items()],
        [helper.make_tensor_value_info(n, kinds["q"], None) for n in outputs],
    )
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads_of(cell), 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(x) for n, x in feeds.items()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("out")
    for name in outputs[1:]:  # appended in place: no copy of the cache is timed
        binding.bind_ortvalue_output(name, values[name.replace("present", "past")])
    return lambda: session.run_with_iobinding(binding)
