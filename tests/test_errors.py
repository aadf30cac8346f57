"""Every refusal: its kind, and a text that names function, argument, got and expected. Those of
torch's tensors: test_errors_torch.py.
"""

from __future__ import annotations

from typing import Any

import flashattn as fa
import numpy as np
import pytest


def arrays(*shapes: tuple[int, ...], dtype: Any = np.float32) -> list[Any]:
    return [np.ones(shape, dtype) for shape in shapes]


Q, K, V = arrays((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6))


def read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


OPTION_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"casual": True}, TypeError, r"attention: unknown option 'casual'; the options are scale, "),
    ({"scale": "1"}, TypeError, r"attention: scale \('1'\) must be a real number"),
    ({"scale": 1 + 2j}, TypeError, r"attention: scale \(\(1\+2j\)\) must be a real number"),
    ({"scale": np.complex64(1 + 2j)}, TypeError, r"attention: scale \(.*\) must be a real number"),
    ({"scale": float("nan")}, ValueError, r"attention: scale \(nan\) must be finite"),
    ({"scale": float("inf")}, ValueError, r"attention: scale \(inf\) must be finite"),
    ({"causal": "bottom"}, ValueError, r"attention: causal \('bottom'\) must be False, True or"),
    ({"causal": None}, TypeError, r"attention: causal \(None\) must be False, True or"),
    ({"causal": 1}, TypeError, r"attention: causal \(1\) must be False, True or"),
    ({"window": (-2, 0)}, ValueError, r"attention: window\.left \(-2\) must be at least -1"),
    ({"window": (0, -2)}, ValueError, r"attention: window\.right \(-2\) must be at least -1"),
    ({"window": (1.0, 0)}, ValueError, r"attention: window \(\(1\.0, 0\)\) must be a pair of ints"),
    ({"window": (True, 0)}, ValueError, r"attention: window \(.*\) must be a pair of ints"),
    ({"window": 3}, ValueError, r"attention: window \(3\) must be a pair of ints"),
    ({"window": (1, 2, 3)}, ValueError, r"attention: window \(.*\) must be a pair of ints"),
    ({"window": (2**63, 0)}, ValueError, r"attention: window \(9223372036854775808\) must be betw"),
    ({"softcap": -1.0}, ValueError, r"attention: softcap \(-1\) must be finite and not negative"),
    ({"softcap": 1e-60}, ValueError, r"attention: softcap \(1e-60\) must be 0 \(off\), or above 0"),
    ({"softcap": None}, TypeError, r"attention: softcap \(None\) must be a real number"),
    ({"dropout_p": -0.1, "dropout_seed": 1}, ValueError, r"attention: dropout_p \(-0\.1\) must"),
    ({"dropout_p": 1.5, "dropout_seed": 1}, ValueError, r"attention: dropout_p \(1\.5\) must be"),
    ({"dropout_p": float("nan")}, ValueError, r"attention: dropout_p \(nan\) must be between 0"),
    ({"dropout_seed": -1}, ValueError, r"attention: dropout_seed \(-1\) must be between 0 and "),
    ({"dropout_seed": 2**64}, ValueError, r"attention: dropout_seed \(\d+\) must be between 0 and"),
    ({"dropout_seed": 1.0}, TypeError, r"attention: dropout_seed \(1\.0\) must be an int"),
    ({"dropout_offset": "0"}, TypeError, r"attention: dropout_offset \('0'\) must be an int"),
    ({"dropout_shard": (1, 0, 1, 0, 1, 0)}, TypeError, r"attention: dropout_shard .* DropoutShard"),
    (
        {"dropout_shard": fa.DropoutShard(4, 1, 5, 0, 7, 0)},
        ValueError,
        r"attention: dropout_shard\.head_start \(1\) must place 4 inside the global 4",
    ),
    ({"q_offset": 1.5}, TypeError, r"attention: q_offset"),
    ({"q_offset": True}, TypeError, r"attention: q_offset \(True\) must be an int"),
    ({"q_offset": [0, 0, 0]}, ValueError, r"attention: q_offset\.shape \(\(3,\)\) must be \(2,\)"),
    ({"q_offset": [0, 1.5]}, TypeError, r"attention: q_offset \(1\.5\) must be an int"),
    ({"q_offset": np.zeros(2)}, TypeError, r"attention: q_offset\.dtype \(float64\) must be int32"),
    ({"k_offset": 2**62}, ValueError, r"attention: k_offset \(\d+\) must be between"),
    ({"kv_lengths": [8, 7]}, ValueError, r"attention: kv_lengths\[0\] \(8\) must be between 0 and"),
    ({"kv_lengths": [-1, 7]}, ValueError, r"attention: kv_lengths\[0\] \(-1\) must be between 0"),
    ({"kv_lengths": [7]}, ValueError, r"attention: kv_lengths\.shape \(\(1,\)\) must be \(2,\)"),
    ({"kv_lengths": 7}, TypeError, r"attention: kv_lengths \(int\) must be an array"),
    ({"layout": "bhqd"}, ValueError, r"attention: layout \('bhqd'\) must be \"bshd\" or \"bhsd\""),
    ({"layout": None}, ValueError, r"attention: layout \(None\) must be"),
    ({"backend": "abacus"}, ValueError, r"attention: backend \(\"abacus\"\) must be one of: .*cpu"),
    ({"backend": 3}, TypeError, r"attention: backend \(3\) must be a backend's name"),
    ({"mask": np.ones((5, 8), bool)}, ValueError, r"attention: mask\.shape \(.*\) must broadcast"),
    (
        {"mask": np.ones((5, 7), np.int64)},
        TypeError,
        r"attention: mask\.dtype \(int64\) must be bo",
    ),
    ({"mask": np.ones((5, 7), np.uint8)}, TypeError, r"attention: mask\.dtype \(uint8\) must be"),
    ({"mask": [[True]]}, TypeError, r"attention: mask \(list\) must be an array"),
    ({"alibi_slopes": np.ones(3, np.float32)}, ValueError, r"attention: alibi_slopes\.shape"),
    ({"alibi_slopes": np.ones(4)}, TypeError, r"attention: alibi_slopes\.dtype \(float64\) must"),
    ({"sinks": np.ones(3, np.float32)}, ValueError, r"attention: sinks\.shape \(\(3,\)\) must be"),
]


@pytest.mark.parametrize(("options", "kind", "text"), OPTION_ERRORS, ids=lambda x: str(x)[:40])
def test_options(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        fa.attention(Q, K, V, **options)


ARRAY_ERRORS: list[tuple[tuple[Any, Any, Any], type[Exception], str]] = [
    ((Q[0], K, V), ValueError, r"attention: query\.ndim \(3\) must be 4"),
    ((Q, K[0], V), ValueError, r"attention: key\.ndim \(3\) must be 4"),
    ((Q, K, V[0]), ValueError, r"attention: value\.ndim \(3\) must be 4"),
    (
        (Q, K[..., :4], V),
        ValueError,
        r"attention: key\.head_dim \(4\) must equal query\.head_dim \(8",
    ),
    ((Q, K[:1], V), ValueError, r"attention: key\.batch \(1\) must equal query\.batch \(2\)"),
    ((Q, K, V[:1]), ValueError, r"attention: value\.batch \(1\) must equal query\.batch \(2\)"),
    ((Q, K[:, :3], V), ValueError, r"attention: value\.seqlen \(7\) must equal key\.seqlen \(3\)"),
    ((Q, K, V[:, :, :1]), ValueError, r"attention: value\.heads \(1\) must equal key\.heads \(2\)"),
    ((Q[:, :, :3], K, V), ValueError, r"attention: query\.heads \(3\) must be a multiple of key"),
    (
        (Q[..., :0], K[..., :0], V),
        ValueError,
        r"attention: query\.head_dim \(0\) must be between 1",
    ),
    ((Q, K, V[..., :0]), ValueError, r"attention: value\.value_dim \(0\) must be between 1"),
    (
        (Q, K.astype(np.float16), V),
        TypeError,
        r"attention: key\.dtype \(float16\) must equal query",
    ),
    (
        (Q.astype(float),) * 3,
        TypeError,
        r"attention: query\.dtype \(float64\) must be float32, flo",
    ),
    (
        (Q.astype(int),) * 3,
        TypeError,
        r"attention: query\.dtype \(int64\) must be float32, float16",
    ),
    ((Q.astype(">f4"),) * 3, TypeError, r"attention: query\.dtype \(>f4\) must be a native"),
    ((Q.astype(complex),) * 3, TypeError, r"attention: query\.dtype \(complex128\) must be"),
    ((Q.astype(object),) * 3, TypeError, r"attention: query\.dtype \(object\) must be"),
    (
        (np.ma.masked_array(Q), K, V),
        TypeError,
        r"attention: query \(masked array\) must be a plain",
    ),
    (
        ([[1.0]], K, V),
        TypeError,
        r"attention: query \(list\) must be a numpy array, a torch tensor",
    ),
    ((Q, None, V), TypeError, r"attention: key \(NoneType\) must be a numpy array"),
]


@pytest.mark.parametrize(("inputs", "kind", "text"), ARRAY_ERRORS, ids=lambda x: str(x)[:40])
def test_arrays(inputs: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        fa.attention(*inputs)


def test_too_many_axes() -> None:
    with pytest.raises(ValueError, match=r"attention: mask\.ndim \(5\) must be at most 4"):
        fa.attention(Q, K, V, mask=np.ones((1,) * 5, bool))


def test_other_devices_are_named() -> None:
    class OnGpu:
        shape, dtype = Q.shape, Q.dtype

        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    with pytest.raises(ValueError, match=r"query\.device \(DLPack type 2\) must be the CPU"):
        fa.attention(OnGpu(), OnGpu(), OnGpu())


OUT = np.zeros((2, 5, 4, 6), np.float32)
OUT_ERRORS: list[tuple[Any, type[Exception], str]] = [
    (OUT[:1], ValueError, r"attention: out\.shape \(\(1, 5, 4, 6\)\) must be \(2, 5, 4, 6\)"),
    (
        OUT.astype(np.float16),
        TypeError,
        r"attention: out\.dtype \(float16\) must equal query\.dtype",
    ),
    (read_only(OUT.copy()), ValueError, r"attention: out \(read-only\) must be writable"),
    (np.broadcast_to(OUT[:1], OUT.shape), ValueError, r"attention: out"),
    (3, TypeError, r"attention: out \(int\) must be an array of query's framework"),
    ((OUT, np.zeros((2, 4, 4), np.float32)), ValueError, r"attention: lse\.shape \(\(2, 4, 4\)\)"),
    ((OUT, np.zeros((2, 4, 5))), TypeError, r"attention: lse\.dtype \(float64\) must be float32"),
]


@pytest.mark.parametrize(("out", "kind", "text"), OUT_ERRORS, ids=lambda x: str(x)[:40])
def test_out(out: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        fa.attention(Q, K, V, out=out)


def test_out_that_overlaps_an_input() -> None:
    q = np.ones((1, 8, 2, 8), np.float32)
    for out in (q, q[:, ::-1]):
        with pytest.raises(ValueError, match=r"attention: out"):
            fa.attention(q, q.copy(), q.copy(), out=out)
    memory = np.ones(2 * q.size, np.float32)
    first, second = (memory[i : i + q.size].reshape(q.shape) for i in (0, q.size // 2))
    with pytest.raises(ValueError, match=r"attention: out \(shares memory with query\) must not"):
        fa.attention(first, q, q, out=second)
    sinks = memory[-2:]
    with pytest.raises(ValueError, match=r"attention: out \(shares memory with sinks\) must not"):
        fa.attention(q, q, q, out=memory[q.size :].reshape(q.shape), sinks=sinks)
    out, lse = memory[: q.size].reshape(q.shape), memory[q.size - 1 :][:16].reshape(1, 2, 8)
    with pytest.raises(ValueError, match=r"attention: lse \(shares memory with out\) must not"):
        fa.attention(q, q, q, out=(out, lse))
    misaligned = np.zeros(q.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(q.shape)
    with pytest.raises(ValueError, match="out must be aligned to its item size"):
        fa.attention(q, q, q, out=misaligned)


def test_backward() -> None:
    out, lse = fa.attention_forward(Q, K, V)
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((out[..., :5], Q, K, V, out, lse), ValueError, r"attention_backward: dout\.shape"),
        ((out, Q, K, V, out[:, :4], lse), ValueError, r"attention_backward: out\.shape"),
        ((out, Q, K, V, out, lse[:, :3]), ValueError, r"attention_backward: lse\.shape"),
        ((out, Q, K, V, out, lse, lse[:1]), ValueError, r"attention_backward: dlse\.shape"),
        (
            (out.astype(np.float16), Q, K, V, out, lse),
            TypeError,
            r"attention_backward: dout\.dtype",
        ),
        ((out, Q, K, V, out, lse.astype(float)), TypeError, r"attention_backward: lse\.dtype"),
        ((out, Q, K[..., :4], V, out, lse), ValueError, r"attention_backward: key\.head_dim \(4\)"),
        ((None, Q, K, V, out, lse), ValueError, r"attention_backward: dout"),
    ]
    for arguments, kind, text in cases:
        with pytest.raises(kind, match=text):
            fa.attention_backward(*arguments)
    for name in ("mask", "alibi_slopes", "sinks"):
        with pytest.raises(
            TypeError, match=rf"attention_backward: {name} \(list\) must be an array"
        ):
            fa.attention_backward(out, Q, K, V, out, lse, **{name: [1.0]})
    with pytest.raises(ValueError, match=r"attention_backward: dropout_seed \(not given\) must be"):
        fa.attention_backward(out, Q, K, V, out, lse, dropout_p=0.1)
    with pytest.raises(ValueError, match=r"attention_forward: dropout_seed \(not given\) must be"):
        fa.attention_forward(Q, K, V, dropout_p=0.1)
