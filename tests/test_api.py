"""The public names: signatures, shapes, results in the caller's framework, `out=`, machine facts.

Numbers are the business of test_forward and test_backward; here two float32 calls are compared with
each other, bit for bit.
"""

from __future__ import annotations

import inspect
from typing import Any

import flashattn as fa
import ml_dtypes
import numpy as np
import pytest
from flashattn._options import AttentionOptions
from targets import chosen_backend

OPTIONS = [
    "scale",
    "causal",
    "window",
    "mask",
    "softcap",
    "alibi_slopes",
    "sinks",
    "dropout_p",
    "dropout_seed",
    "dropout_offset",
    "dropout_shard",
    "q_offset",
    "k_offset",
    "kv_lengths",
    "layout",
    "backend",
]


def arrays(*shapes: tuple[int, ...], dtype: Any = np.float32) -> list[Any]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


QKV = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6))


def test_public_names() -> None:
    assert set(fa.__all__) == {
        "AttentionGradients",
        "BackendInfo",
        "CopyStats",
        "DropoutShard",
        "__version__",
        "alibi_slopes",
        "attention",
        "attention_backward",
        "attention_forward",
        "attention_kvcache",
        "attention_varlen",
        "attention_varlen_backward",
        "backends",
        "copy_stats",
        "dropout_mask",
        "empty",
        "flash_attn_combine",
        "flash_attn_func",
        "flash_attn_kvpacked_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func",
        "flash_attn_varlen_kvpacked_func",
        "flash_attn_varlen_qkvpacked_func",
        "flash_attn_with_kvcache",
        "get_num_threads",
        "merge_attention",
        "metal",
        "set_num_threads",
        "show_config",
    }
    for name in fa.__all__:
        assert getattr(fa, name).__doc__, name


@pytest.mark.parametrize("function", [fa.attention, fa.attention_forward, fa.attention_backward])
def test_every_option_is_in_signature_and_docstring(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    assert [name for name in parameters if name in OPTIONS] == OPTIONS
    assert set(OPTIONS) == set(AttentionOptions.__annotations__)
    for name in OPTIONS:
        assert f"\n{name}: " in inspect.cleandoc(function.__doc__).replace("    ", ""), name


def test_shapes_dtypes_and_defaults() -> None:
    q, k, v = arrays(*QKV)
    out, lse = fa.attention_forward(q, k, v)
    assert (out.shape, out.dtype) == ((2, 5, 4, 6), np.float32)
    assert (lse.shape, lse.dtype) == ((2, 4, 5), np.float32)
    assert out.flags.c_contiguous
    assert out.flags.writeable
    assert np.array_equal(fa.attention(q, k, v), out)
    pair = fa.attention(q, k, v, return_lse=True)
    assert isinstance(pair, tuple)
    assert np.array_equal(pair[1], lse)
    defaults = fa.attention(
        q,
        k,
        v,
        scale=None,
        causal=False,
        window=(-1, -1),
        mask=None,
        softcap=0.0,
        alibi_slopes=None,
        sinks=None,
        dropout_p=0.0,
        dropout_seed=0,
        dropout_offset=0,
        dropout_shard=None,
        q_offset=None,
        k_offset=0,
        kv_lengths=None,
        layout="bshd",
        backend=None,
    )
    assert np.array_equal(defaults, out)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_dtypes_come_back_as_they_went_in(dtype: Any) -> None:
    q, k, v = arrays(*QKV, dtype=dtype)
    out, lse = fa.attention_forward(q, k, v)
    assert out.dtype == dtype
    assert lse.dtype == np.float32
    gradients = fa.attention_backward(out, q, k, v, out, lse)
    assert [g.dtype for g in gradients[:3]] == [dtype] * 3


def test_gradients() -> None:
    q, k, v = arrays(*QKV)
    out, lse = fa.attention_forward(q, k, v, causal=True)
    gradients = fa.attention_backward(out, q, k, v, out, lse, causal=True)
    assert gradients._fields == ("dq", "dk", "dv", "dmask", "dalibi_slopes", "dsinks")
    assert [g.shape for g in gradients[:3]] == [q.shape, k.shape, v.shape]
    assert gradients[3:] == (None, None, None)
    # dlse counts, and only what is asked for.
    more = fa.attention_backward(out, q, k, v, out, lse, np.ones_like(lse), causal=True)
    assert not np.array_equal(more.dq, gradients.dq)
    assert np.array_equal(more.dv, gradients.dv)


def test_layouts_are_the_same_numbers() -> None:
    q, k, v = arrays(*QKV)
    out, lse = fa.attention_forward(q, k, v, causal=True)
    gradients = fa.attention_backward(out, q, k, v, out, lse, causal=True)

    def swap(x: Any) -> Any:
        return np.ascontiguousarray(x.swapaxes(1, 2))

    options: dict[str, Any] = {"causal": True, "layout": "bhsd"}
    heads_first = [swap(x) for x in (q, k, v)]
    out2, lse2 = fa.attention_forward(*heads_first, **options)
    assert np.array_equal(swap(out2), out)
    assert np.array_equal(lse2, lse)
    gradients2 = fa.attention_backward(out2, *heads_first, out2, lse2, **options)
    for one, other in zip(gradients[:3], gradients2[:3], strict=True):
        assert np.array_equal(swap(other), one)


def test_offsets_and_lengths_in_every_spelling() -> None:
    q, k, v = arrays(*QKV)
    expected = fa.attention(q, k, v, causal=True, q_offset=1)
    for spelling in ([1, 1], (1, 1), np.array([1, 1]), np.array([1, 1], np.int32), np.int64(1)):
        assert np.array_equal(fa.attention(q, k, v, causal=True, q_offset=spelling), expected)
    assert np.array_equal(fa.attention(q, k, v, causal=True, q_offset=3, k_offset=2), expected)
    lengths = fa.attention(q, k, v, kv_lengths=[4, 7])
    assert np.array_equal(lengths, fa.attention(q, k, v, kv_lengths=np.array([4, 7], np.int32)))
    assert np.array_equal(lengths[1], fa.attention(q, k, v)[1])
    assert np.array_equal(lengths[0], fa.attention(q[:1], k[:1, :4], v[:1, :4])[0])
    top_left = fa.attention(q, k, v, causal="top_left")
    assert np.array_equal(top_left, fa.attention(q, k, v, causal=True, q_offset=0))
    windowed = fa.attention(q, k, v, window=(-1, 0))
    assert np.array_equal(windowed, fa.attention(q, k, v, causal=np.True_))


def test_out_is_written_and_returned() -> None:
    q, k, v = arrays(*QKV)
    expected, expected_lse = fa.attention_forward(q, k, v)
    out = np.full(expected.shape, np.nan, np.float32)
    assert fa.attention(q, k, v, out=out) is out
    assert np.array_equal(out, expected)
    # A strided place inside something larger, and lse too.
    larger = np.full((2, 5, 4, 12), np.nan, np.float32)
    lse = np.full(expected_lse.shape, np.nan, np.float32)
    result = fa.attention_forward(q, k, v, out=(larger[..., ::2], lse))
    assert np.array_equal(larger[..., ::2], expected)
    assert np.isnan(larger[..., 1::2]).all()
    assert result[1] is lse
    assert np.array_equal(lse, expected_lse)


def test_empty_is_page_aligned_memory() -> None:
    array = fa.empty((3, 5), np.float16)
    assert (array.shape, array.dtype) == ((3, 5), np.float16)
    assert array.ctypes.data % 4096 == 0
    assert array.flags.c_contiguous
    assert array.flags.writeable
    array[...] = 1
    assert fa.empty(7).shape == (7,)
    assert fa.empty((2, 0, 3)).size == 0
    assert fa.empty((2, 2), ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16
    with pytest.raises(ValueError, match=r"empty: shape .* must not have negative sizes"):
        fa.empty((2, -1))
    with pytest.raises(TypeError, match="must not hold Python objects"):
        fa.empty((2,), object)
    assert fa.attention(*arrays(*QKV)).ctypes.data % 64 == 0


def test_backends() -> None:
    infos = fa.backends()
    cpu = infos[-1]
    assert cpu.name == "cpu"
    assert cpu.available
    assert cpu.reason == ""
    assert {"forward", "backward", "float32", "bfloat16"} <= set(cpu.features)
    assert [info.name for info in infos] in (["cpu"], ["metal", "cpu"])
    assert cpu.default is True
    for info in infos:
        assert info.default is ("simulated" not in info.device), info.name
    q, k, v = arrays(*QKV)
    chosen = fa.attention(q, k, v, backend=chosen_backend())
    assert np.array_equal(chosen, fa.attention(q, k, v))


def test_features_are_public_names() -> None:
    """Passes, dtypes, head groups, and options under the names that a call takes."""
    others = {"forward", "backward", "float32", "float16", "bfloat16", "gqa", "value_dim"}
    functions = {"attention_varlen", "attention_kvcache"}
    for info in fa.backends():
        assert set(info.features) <= others | functions | set(OPTIONS), info.name
        assert others <= set(info.features), info.name


def test_environment_chooses_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = arrays(*QKV)
    monkeypatch.setenv("FLASHATTN_BACKEND", "abacus")
    with pytest.raises(
        ValueError, match=r'attention: FLASHATTN_BACKEND \("abacus"\) must be one of: .*cpu'
    ):
        fa.attention(q, k, v)
    assert fa.attention(q, k, v, backend="cpu").shape == (2, 5, 4, 6)


def test_threads() -> None:
    before = fa.get_num_threads()
    try:
        fa.set_num_threads(3)
        assert fa.get_num_threads() == 3
        for wrong in (0, -1, 10**30, -(10**30)):
            with pytest.raises(ValueError, match="threads"):
                fa.set_num_threads(wrong)
        for kind in (1.5, "2", True, None):
            with pytest.raises(TypeError, match="set_num_threads: threads"):
                fa.set_num_threads(kind)  # type: ignore[arg-type]
        assert fa.get_num_threads() == 3
    finally:
        fa.set_num_threads(before)


def test_show_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert fa.show_config() is None
    text = capsys.readouterr().out
    for word in (fa.__version__, np.__version__, "isa", "threads", "cpu"):
        assert word in text
    facts = fa.show_config("dict")
    assert facts is not None
    assert facts["cpu"]["isa"] in facts["cpu"]["isas"]
    with pytest.raises(ValueError, match="show_config: mode"):
        fa.show_config("xml")  # type: ignore[arg-type]
