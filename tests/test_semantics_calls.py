"""The rules of docs/semantics.md about packed sequences, caches, the flash_attn functions and known
answers, a test each; and that the document and the tests name each other.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import philox
import pytest
from cases import check_arrays
from score_calls import CLOSE, identity, normal, refuses_wrong_arguments, softmax, weights
from targets import Target
from tolerance import assert_close

HERE = Path(__file__).resolve().parent


def test_s35_packed_sequences(target: Target) -> None:
    """cu_seqlens of int32 or int64 rise from 0; causal holds per sequence; a length of 0 is a
    length; rows of no sequence are 0 (lse -inf), whatever they hold.
    """
    forward = target.function("attention_varlen")
    backward = target.function("attention_varlen_backward")
    assert forward is not None
    assert backward is not None
    query, key, value, dout = (normal(n, t, 2, 8) for n, t in enumerate((9, 12, 12, 9)))
    for x, used in ((query, 7), (dout, 7), (key, 10), (value, 10)):
        x[used:] = np.nan
    cu_q, cu_k = [0, 3, 3, 7], [0, 5, 10, 10]
    for dtype in (np.int32, np.int64):
        starts = np.array(cu_q, dtype), np.array(cu_k, dtype)
        out, lse = forward(query, key, value, *starts, causal=True)
        grads = backward(dout, query, key, value, out, lse, *starts, causal=True)
        assert lse.shape == (2, 9)
        alone, alone_lse = target.forward(
            query[None, :3], key[None, :5], value[None, :5], causal=True
        )
        np.testing.assert_allclose(out[:3], alone[0], **CLOSE)
        np.testing.assert_allclose(lse[:, :3], alone_lse[0], **CLOSE)
        assert (out[3:] == 0).all()
        assert np.isneginf(lse[:, 3:]).all()
        for gradient, used in ((grads.dq, 3), (grads.dk, 5), (grads.dv, 5)):
            assert np.isfinite(np.asarray(gradient)).all()
            assert (np.asarray(gradient)[used:] == 0).all()
    if refuses_wrong_arguments(target):
        for wrong in ([0, 4, 3, 7], [1, 3, 3, 7], [0, 3, 3, 10]):
            with pytest.raises(ValueError, match="cu_seqlens_q"):
                forward(query, key, value, np.array(wrong), np.array(cu_k))


def test_s36_kv_cache(target: Target) -> None:
    """Each entry sees the rows before its length and no others; pages hold the same bits."""
    function = target.function("attention_kvcache")
    assert function is not None
    query, caches = normal(0, 2, 1, 2, 8), [normal(n, 2, 12, 1, 8) for n in (1, 2)]
    lengths = [5, 9]
    for cache in caches:
        for b, length in enumerate(lengths):
            cache[b, length:] = np.nan
    out, lse = function(
        query, *(c.copy() for c in caches), cache_seqlens=np.array(lengths, np.int32)
    )
    for b, length in enumerate(lengths):
        rows = [c[b : b + 1, :length].copy() for c in caches]
        alone, alone_lse = target.forward(query[b : b + 1], *rows)
        np.testing.assert_allclose(out[b], alone[0], **CLOSE)
        np.testing.assert_allclose(lse[b], alone_lse[0], **CLOSE)
    table = np.array([[3, 0, 5], [1, 4, 2]], np.int32)
    pages = []
    for cache in caches:
        paged = np.empty((6, 4, 1, 8), np.float32)
        paged[table.ravel()] = cache.reshape(6, 4, 1, 8)
        pages.append(paged)
    paged_out, paged_lse = function(
        query, *pages, cache_seqlens=np.array(lengths, np.int32), block_table=table
    )
    np.testing.assert_array_equal(paged_out, out)
    np.testing.assert_array_equal(paged_lse, lse)


@pytest.fixture
def upstream(target: Target, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, whose flash_attn functions take no backend, choosing this target's."""
    if target.backend == "oracle":
        pytest.skip("these functions are the package's")
    import flashattn as fa

    monkeypatch.setenv("FLASHATTN_BACKEND", target.backend)
    return fa


def _means(upstream: Any, seqlen_q: int, seqlen_k: int, **opts: Any) -> np.ndarray:
    """The mean of the numbers of the keys that each row sees."""
    query, key = (np.zeros((1, t, 1, 4), np.float32) for t in (seqlen_q, seqlen_k))
    value = np.arange(seqlen_k, dtype=np.float32)[None, :, None, None]
    found: np.ndarray = upstream.flash_attn_func(query, key, value, **opts).ravel()
    return found


def test_s37_flash_attn_alignment(target: Target, upstream: Any) -> None:
    """(B, T, H, D); causal bottom-right; windows inclusive; rows that see nothing are 0."""
    np.testing.assert_allclose(_means(upstream, 2, 5, causal=True), [1.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(_means(upstream, 2, 5, window_size=(1, 1)), [3.0, 3.5], rtol=1e-6)
    np.testing.assert_array_equal(_means(upstream, 5, 2, causal=True)[:3], [0, 0, 0])


def test_s38_flash_attn_return_attn_probs(target: Target, upstream: Any) -> None:
    """(out, softmax_lse, S_dmask): weights, negative where dropout takes them."""
    query, key, value = normal(0, 1, 3, 2, 8), normal(1, 1, 6, 2, 8), normal(2, 1, 6, 2, 8)
    out, lse, nothing = upstream.flash_attn_func(query, key, value, return_attn_probs=True)
    np.testing.assert_array_equal(out, upstream.flash_attn_func(query, key, value))
    assert lse.shape == (1, 2, 3)
    assert nothing.size == 0
    np.random.seed(0)  # noqa: NPY002, whence the seed of a numpy call comes
    out, lse, signed = upstream.flash_attn_func(
        query, key, value, dropout_p=0.5, return_attn_probs=True
    )
    assert signed.shape == (1, 2, 3, 6)
    np.testing.assert_allclose(np.abs(signed).sum(axis=-1), 1.0, rtol=1e-6)
    assert 0 < (signed < 0).sum() < signed.size
    kept = 2 * np.maximum(signed, 0.0)
    np.testing.assert_allclose(out, np.einsum("bhij,bjhd->bihd", kept, value), **CLOSE)


def test_s39_flash_attn_varlen_lse(target: Target, upstream: Any) -> None:
    """(heads, total_q)."""
    query, starts = normal(0, 7, 2, 8), np.array([0, 3, 7], np.int32)
    out, lse, _ = upstream.flash_attn_varlen_func(
        query, query, query, starts, starts, 4, 4, causal=True, return_attn_probs=True
    )
    assert out.shape == (7, 2, 8)
    assert lse.shape == (2, 7)
    assert lse.dtype == np.float32


def test_s40_flash_attn_alibi(target: Target, upstream: Any) -> None:
    """-slope * |i + Tk - Tq - j|."""
    none, slopes = np.zeros((1, 2, 1, 5), np.float32), np.array([0.5], np.float32)
    out = upstream.flash_attn_func(none, identity(5), identity(5), alibi_slopes=slopes)
    distance = np.abs(np.arange(2)[:, None] + 3 - np.arange(5))
    np.testing.assert_allclose(out[0, :, 0], softmax(-0.5 * distance)[0], **CLOSE)


def test_s41_torchs_alignment_is_top_left(target: Target, upstream: Any) -> None:
    """is_causal of scaled_dot_product_attention; a row that sees nothing is 0, as torch has it and
    not the mean of the values, as JAX and MLX do.
    """
    torch = pytest.importorskip("torch")
    from flashattn.torch import scaled_dot_product_attention

    none, value = torch.zeros(1, 1, 2, 4), torch.arange(5.0).view(1, 1, 5, 1)
    key = torch.zeros(1, 1, 5, 4)
    out = scaled_dot_product_attention(none, key, value, is_causal=True)
    np.testing.assert_allclose(out.ravel(), [0.0, 0.5], rtol=1e-6)
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    assert (scaled_dot_product_attention(none, key, value, attn_mask=hidden) == 0).all()


def test_s42_sliding_window_of_w_keys(target: Target) -> None:
    """Hugging Face's sliding_window=W is window=(W - 1, 0): a row sees W keys, itself included."""
    seen = weights(target, np.zeros((9, 9)), window=(4 - 1, 0))[0] != 0
    np.testing.assert_array_equal(seen.sum(axis=1), [1, 2, 3, *[4] * 6])
    transformers = pytest.importorskip("transformers")
    from flashattn.transformers import _Parts, _recognise

    parts = _Parts()
    assert _recognise(transformers.masking_utils.sliding_window_overlay(4), parts)
    assert parts.window == (4 - 1, -1)


def test_s43_philox_known_answers(target: Target) -> None:
    """Random123's words, told from outside: unit = (word >> 8) 2^-24 is kept at p = unit and
    dropped at the next p. Counters with high words: tests/cpp/test_philox.cpp, test_reference.py.
    """
    keep = target.function("dropout_mask")
    assert keep is not None
    words = [int(w, 16) for w in ("6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8")]
    for j, word in enumerate(words):
        unit = (word >> 8) * 2.0**-24
        assert keep((1, 1, 1, 4), unit, 0)[0, 0, 0, j] > 0
        assert keep((1, 1, 1, 4), unit + 2.0**-24, 0)[0, 0, 0, j] == 0
        none = np.zeros((1, 1, 1, 4), np.float32)
        for p in (unit, unit + 2.0**-24):
            out, _ = target.forward(none, identity(4), identity(4), dropout_p=p, dropout_seed=0)
            assert (out[0, 0, 0, j] > 0) == (p == unit)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, key, text in (
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (pi, (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        drawn = philox.philox4x32(tuple(np.array([c], np.uint64) for c in counter), key)
        assert [int(w[0]) for w in drawn] == [int(w, 16) for w in text.split()]


@pytest.mark.parametrize("name", ["4d_causal", "4d_diff_heads_mask4d_padded_kv"])
def test_s44_onnx_golden_cases(target: Target, name: str) -> None:
    """Two of the 64; all of them: test_onnx.py."""
    pytest.importorskip("onnx", "1.22.0")
    import test_onnx

    golden = test_onnx.load(name)
    check_arrays(target, golden.query, golden.key, golden.value, **golden.options)


def test_s45_values_of_the_identity_show_the_weights(target: Target) -> None:
    scores = normal(0, 3, 7)
    np.testing.assert_allclose(weights(target, scores)[0], softmax(scores)[0], **CLOSE)


def test_s46_the_tolerance_is_one_rule() -> None:
    """2 x the plain error + 2 x what storing costs; 3 x for gradients."""
    exact = np.array([1.0, 2.0])
    assert_close(exact + 2e-3, exact, 1e-3)
    assert_close(exact + 3e-3, exact, 1e-3, factor=3.0)
    with pytest.raises(AssertionError, match="allowed"):
        assert_close(exact + 2.1e-3, exact, 1e-3)
    half = np.array([1.0, 2.0], np.float16)
    with pytest.raises(AssertionError, match="allowed"):
        assert_close(half + np.float16(2.0**-6), exact, 0.0)


def test_the_document_and_the_tests_name_each_other() -> None:
    """One row of docs/semantics.md's tables for each test here, in its order."""
    text = "".join(
        (HERE / f"test_semantics{part}.py").read_text() for part in ("", "_values", "_calls")
    )
    tests = re.findall(r"^def (test_s\d\d_\w+)\(", text, re.MULTILINE)
    document = (HERE.parent / "docs" / "semantics.md").read_text()
    named = re.findall(r"`(test_s\d\d_\w+)`", document)
    assert named == tests
    assert [int(name[6:8]) for name in tests] == list(range(1, len(tests) + 1))
