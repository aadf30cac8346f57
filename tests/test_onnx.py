"""The golden cases of the ONNX Attention operator (onnx 1.22.0's wheel), on every target.

Mapping: (batch, heads, seqlen, dim) or packed (batch, seqlen, heads * dim); without a past, causal
is top-left; a past is concatenated and its length becomes q_offset; nonpad_kv_seqlen is kv_lengths,
aligned bottom-right; a mask narrower than the keys is padded with -inf. The optional score outputs
and the present caches are not ours and are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from cases import check_arrays
from targets import Target

onnx = pytest.importorskip("onnx", "1.22.0")
FOLDER = Path(onnx.__file__).parent / "backend/test/data/node"
CASES = sorted(
    p.name.removeprefix("test_attention_")
    for p in FOLDER.glob("test_attention_*")
    if "_expanded" not in p.name
)


@dataclass
class Golden:
    query: np.ndarray  # (B, Tq, H, D), as key, value
    key: np.ndarray
    value: np.ndarray
    options: dict[str, Any]
    out: np.ndarray  # (B, Tq, H, Dv)


def _split_heads(x: np.ndarray, heads: int | None) -> np.ndarray:
    """To (B, T, H, D) from packed (B, T, H * D) or from (B, H, T, D)."""
    if x.ndim == 3:
        return x.reshape(x.shape[0], x.shape[1], heads, -1)
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3))


def _tensors(folder: Path, kind: str) -> list[np.ndarray]:
    files = sorted(folder.glob(f"{kind}_*.pb"), key=lambda p: int(p.stem.split("_")[1]))
    return [onnx.numpy_helper.to_array(onnx.load_tensor(f)) for f in files]


def _pad_mask(mask: np.ndarray, seqlen_k: int) -> np.ndarray:
    missing = seqlen_k - mask.shape[-1]
    fill = False if mask.dtype == np.bool_ else -np.inf
    return np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=fill)


@cache
def load(name: str) -> Golden:
    folder = FOLDER / f"test_attention_{name}"
    node = onnx.load(folder / "model.onnx").graph.node[0]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    given = iter(_tensors(folder / "test_data_set_0", "input"))
    inputs = {slot: next(given) for slot in node.input if slot}
    heads, kv_heads = attributes.get("q_num_heads"), attributes.get("kv_num_heads")
    query = _split_heads(inputs["Q"], heads)
    key, value = (_split_heads(inputs[n], kv_heads) for n in ("K", "V"))
    options: dict[str, Any] = {n: attributes[n] for n in ("scale", "softcap") if attributes.get(n)}
    causal = bool(attributes.get("is_causal"))
    if "past_key" in inputs:
        past = inputs["past_key"].shape[2]
        key = np.concatenate([_split_heads(inputs["past_key"], None), key], axis=1)
        value = np.concatenate([_split_heads(inputs["past_value"], None), value], axis=1)
        options["q_offset"] = past
        options["causal"] = causal
    elif "nonpad_kv_seqlen" in inputs:
        options["kv_lengths"] = inputs["nonpad_kv_seqlen"]
        options["causal"] = causal
    elif causal:
        options["causal"] = "top_left"
    if "attn_mask" in inputs:
        options["mask"] = _pad_mask(inputs["attn_mask"], key.shape[1])
    out = _split_heads(_tensors(folder / "test_data_set_0", "output")[0], heads)
    return Golden(query, key, value, options, out)


def test_there_are_64_cases() -> None:
    assert len(CASES) == 64


@pytest.mark.parametrize("name", CASES)
def test_oracle_agrees(name: str) -> None:
    """Our rules are ONNX's rules; what is left is the golden file's own rounding (a few ulp of its
    dtype).
    """
    golden = load(name)
    exact = reference.attention(golden.query, golden.key, golden.value, **golden.options)
    ulp = float(np.finfo(golden.out.dtype).eps)
    np.testing.assert_allclose(golden.out, exact.out, atol=8 * ulp, rtol=8 * ulp)


@pytest.mark.parametrize("name", CASES)
def test_golden_case(target: Target, name: str) -> None:
    golden = load(name)
    inputs = golden.query, golden.key, golden.value
    if target.refuses(lambda: target.forward(*inputs, **golden.options), golden.options):
        return
    check_arrays(target, *inputs, **golden.options)
