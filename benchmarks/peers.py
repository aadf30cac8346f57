"""One side of the comparison, in a process of its own: `python peers.py SIDE`.

Answers one JSON line per JSON line. {"cell": ...} builds arrays and model and warms up, answering
{"first": seconds} or {"skip": reason}; {"seconds": s} runs it for about that long and answers the
median processor and wall time of a run. Each runtime gets its own favourite layout and one thread.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Call = Callable[[], object]
_SLOW_SECONDS = 2.0  # a run this long is not repeated


def _random(dtype: str, *shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
    if dtype == "bfloat16":
        import ml_dtypes

        return [x.astype(ml_dtypes.bfloat16) for x in arrays]
    return [x.astype(dtype) for x in arrays]


def flashattn_call(cell: dict[str, Any]) -> Call:
    import flashattn as fa

    fa.set_num_threads(1)
    if cell["pass"] == "decode":
        heads, kv_heads, seqlen, head_dim = cell["shape"]
        cache = (1, seqlen, kv_heads, head_dim)
        q, k, v = _random(cell["dtype"], (1, 1, heads, head_dim), cache, cache)
        return lambda: fa.attention(q, k, v)
    batch, heads, seqlen, head_dim = cell["shape"]
    q, k, v, dout = _random(cell["dtype"], *[(batch, seqlen, heads, head_dim)] * 4)
    causal = cell["causal"]
    if cell["pass"] == "forward":
        return lambda: fa.attention(q, k, v, causal=causal)
    out, lse = fa.attention_forward(q, k, v, causal=causal)
    return lambda: fa.attention_backward(dout, q, k, v, out, lse, causal=causal)


def torch_call(cell: dict[str, Any]) -> Call:
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    torch.set_num_threads(1)
    dtype = getattr(torch, cell["dtype"])
    torch.manual_seed(0)
    if cell["pass"] == "decode":
        heads, kv_heads, seqlen, head_dim = cell["shape"]
        q = torch.randn(1, heads, 1, head_dim).to(dtype)
        k, v = (torch.randn(1, kv_heads, seqlen, head_dim).to(dtype) for _ in range(2))
        return lambda: sdpa(q, k, v, enable_gqa=heads != kv_heads)
    batch, heads, seqlen, head_dim = cell["shape"]
    q, k, v, dout = (
        torch.randn(batch, seqlen, heads, head_dim).to(dtype).transpose(1, 2) for _ in range(4)
    )
    causal = cell["causal"]
    if cell["pass"] == "forward":
        return lambda: sdpa(q, k, v, is_causal=causal)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = sdpa(q, k, v, is_causal=causal)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def openvino_call(cell: dict[str, Any]) -> Call:
    """Runs opset 13's ScaledDotProductAttention, in (batch, heads, seqlen, dim)."""
    import openvino as ov
    from openvino import opset13

    if cell["pass"] == "backward" or cell["dtype"] == "float16":
        raise NotImplementedError("OpenVINO has no such kernel on the CPU")
    if cell["pass"] == "decode":
        heads, kv_heads, seqlen, head_dim = cell["shape"]
        if heads != kv_heads:
            raise NotImplementedError("the operator has no grouped heads")
        shapes = [(1, heads, 1, head_dim), *[(1, heads, seqlen, head_dim)] * 2]
    else:
        shapes = [tuple(cell["shape"])] * 3
    kind = {"float32": ov.Type.f32, "bfloat16": ov.Type.bf16}[cell["dtype"]]
    inputs = [opset13.parameter(list(shape), kind) for shape in shapes]
    node = opset13.scaled_dot_product_attention(*inputs, causal=cell["causal"])
    compiled = ov.Core().compile_model(
        ov.Model([node], inputs),
        "CPU",
        {
            "INFERENCE_NUM_THREADS": 1,
            "INFERENCE_PRECISION_HINT": "f32" if cell["dtype"] == "float32" else "bf16",
        },
    )
    request = compiled.create_infer_request()
    for index, x in enumerate(_random(cell["dtype"], *shapes)):
        tensor = ov.Tensor(kind, ov.Shape(list(x.shape)))
        bits = np.uint16 if cell["dtype"] == "bfloat16" else np.float32
        np.frombuffer(tensor.data, bits)[...] = x.view(bits).ravel()
        request.set_input_tensor(index, tensor)
    return request.infer


def onnxruntime_call(cell: dict[str, Any]) -> Call:
    """com.microsoft MultiHeadAttention; GroupQueryAttention for decode. float32 only."""
    import onnxruntime
    from onnx import TensorProto, helper

    if cell["pass"] == "backward" or cell["dtype"] != "float32":
        raise NotImplementedError("ONNX Runtime has no such kernel on the CPU")
    real, integer = TensorProto.FLOAT, TensorProto.INT32
    feeds: dict[str, Any] = {}
    if cell["pass"] == "decode":
        heads, kv_heads, seqlen, head_dim = cell["shape"]
        past = seqlen - 1
        q, k, v, past_k, past_v = _random(
            "float32",
            (1, 1, heads * head_dim),
            *[(1, 1, kv_heads * head_dim)] * 2,
            *[(1, kv_heads, past, head_dim)] * 2,
        )
        # The cache has room for the new key, which the operator appends in place.
        cache = [np.concatenate([x, x[:, :, :1]], axis=2) for x in (past_k, past_v)]
        feeds = {"q": q, "k": k, "v": v, "past_k": cache[0], "past_v": cache[1]}
        feeds |= {"lengths": np.array([past], np.int32), "total": np.array([seqlen], np.int32)}
        outputs = ["out", "present_k", "present_v"]
        node = helper.make_node(
            "GroupQueryAttention",
            list(feeds),
            outputs,
            domain="com.microsoft",
            num_heads=heads,
            kv_num_heads=kv_heads,
        )
    else:
        batch, heads, seqlen, head_dim = cell["shape"]
        q, k, v = _random("float32", *[(batch, seqlen, heads * head_dim)] * 3)
        feeds, outputs = {"q": q, "k": k, "v": v}, ["out"]
        node = helper.make_node(
            "MultiHeadAttention",
            list(feeds),
            outputs,
            domain="com.microsoft",
            num_heads=heads,
            unidirectional=int(cell["causal"]),
        )
    graph = helper.make_graph(
        [node],
        "attention",
        [
            helper.make_tensor_value_info(n, integer if x.dtype == np.int32 else real, x.shape)
            for n, x in feeds.items()
        ],
        [helper.make_tensor_value_info(n, real, None) for n in outputs],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
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


SIDES = {
    "flashattn": flashattn_call,
    "torch": torch_call,
    "openvino": openvino_call,
    "onnxruntime": onnxruntime_call,
}


def measure(call: Call, seconds: float) -> dict[str, Any]:
    """Median processor and wall seconds of a run, over at least two unless a run is slow."""
    wall: list[float] = []
    cpu: list[float] = []
    end = time.perf_counter() + seconds
    while len(wall) < 2 or time.perf_counter() < end:
        start, start_cpu = time.perf_counter(), time.process_time()
        call()
        cpu.append(time.process_time() - start_cpu)
        wall.append(time.perf_counter() - start)
        if wall[-1] > _SLOW_SECONDS:
            break
    return {"cpu": statistics.median(cpu), "wall": statistics.median(wall), "runs": len(wall)}


def answer(request: dict[str, Any], side: str, current: list[Call]) -> dict[str, Any]:
    if "cell" in request:
        current.clear()  # the last cell's arrays
        try:
            current.append(SIDES[side](request["cell"]))
            start = time.process_time()
            current[0]()
        except (NotImplementedError, ImportError) as reason:
            return {"skip": str(reason)}
        return {"first": time.process_time() - start}
    if "peak" in request:
        from flashattn import _core

        if request["peak"] == "bandwidth":
            return {"peak": _core.measure_read_bandwidth(256 << 20)[1]}
        halves = _core.measure_bf16_dot_peak() if request["peak"] == "bfloat16" else 0.0
        return {"peak": halves or _core.measure_multiply_add_peak()}
    return measure(current[0], request["seconds"])


def main() -> None:
    current: list[Call] = []
    # Libraries may print: keep standard output for answers.
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line), sys.argv[1], current)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
