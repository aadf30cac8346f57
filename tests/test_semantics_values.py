"""The rules of docs/semantics.md about values, gradients, dropout and bits, a test each.

Gradients are compared with their formulas, written out from weights, not with the oracle.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import philox
import pytest
from cases import DTYPES, check_arrays
from score_calls import (
    CLOSE,
    GRADIENTS_CLOSE,
    all_results,
    assert_same_bits,
    identity,
    normal,
    refuses_wrong_arguments,
    weights,
)
from targets import Target


def test_s21_value_dim_of_its_own(target: Target) -> None:
    """Any two sizes from 1 on; out has the value's. Too large a one is refused with the limit."""
    for head_dim, value_dim in ((1, 16), (16, 1), (5, 13)):
        query, key = normal(0, 1, 3, 1, head_dim), normal(1, 1, 7, 1, head_dim)
        value = normal(2, 1, 7, 1, value_dim)
        found = all_results(target, normal(3, 1, 3, 1, value_dim), query, key, value)
        p, _ = weights(target, (query[0, :, 0] @ key[0, :, 0].T) * head_dim**-0.5)
        np.testing.assert_allclose(found["out"][0, :, 0], p @ value[0, :, 0], **CLOSE)
        assert found["dk"].shape == key.shape
        assert found["dv"].shape == value.shape
    if refuses_wrong_arguments(target):
        large = np.ones((1, 1, 1, target.max_head_dim + 1), np.float32)
        with pytest.raises((ValueError, NotImplementedError), match=str(target.max_head_dim)):
            target.forward(large, large, np.ones((1, 1, 1, 4), np.float32))


def _one_head(seed: int) -> tuple[np.ndarray, ...]:
    """query, key, value, dout, dlse: 5 rows, 7 keys, 8 dimensions."""
    query, key, value, dout = (normal(seed + n, 1, t, 1, 8) for n, t in enumerate((5, 7, 7, 5)))
    return query, key, value, dout, normal(seed + 4, 1, 1, 5)


def _weights_of(target: Target, query: Any, key: Any, **opts: Any) -> np.ndarray:
    """(Tq, Tk) in float64, from a call whose values are the identity."""
    out, _ = target.forward(query, key, identity(key.shape[1]), **opts)
    found: np.ndarray = out[0, :, 0].astype(np.float64)
    return found


def _score_gradients(target: Target, arrays: tuple[np.ndarray, ...], **opts: Any) -> np.ndarray:
    """dS = P * (dP - delta): docs/math.md, for calls without dropout."""
    _, _, value, dout, dlse = (x.astype(np.float64) for x in arrays)
    p = _weights_of(target, arrays[0], arrays[1], **opts)
    dp = dout[0, :, 0] @ value[0, :, 0].T
    return p * (dp - (p * dp).sum(axis=1, keepdims=True) + dlse[0, 0][:, None])


def test_s22_lse(target: Target) -> None:
    """Natural log of the sum over everything in the softmax, float32 (B, H, Tq); differentiable."""
    query, key, value, dout, dlse = _one_head(0)
    opts: dict[str, Any] = {
        "softcap": 2.0,
        "alibi_slopes": np.full(1, 0.25, np.float32),
        "mask": normal(9, 5, 7),
        "sinks": np.array([0.5], np.float32),
    }
    scores = 2.0 * np.tanh((query[0, :, 0] @ key[0, :, 0].T).astype(np.float64) * 8**-0.5 / 2.0)
    scores += opts["mask"] - 0.25 * np.abs(np.arange(5)[:, None] + 2 - np.arange(7))
    out, lse = target.forward(query, key, value, **opts)
    assert lse.dtype == np.float32
    assert lse.shape == (1, 1, 5)
    expected = np.log(np.exp(scores).sum(axis=1) + np.exp(0.5))
    np.testing.assert_allclose(lse[0, 0], expected, **CLOSE)
    _, dropped = target.forward(query, key, value, dropout_p=0.5, dropout_seed=1, **opts)
    np.testing.assert_array_equal(dropped, lse)
    out, lse = target.forward(query, key, value)
    grads = target.backward(np.zeros_like(dout), query, key, value, out, lse, dlse=dlse)
    ds = _weights_of(target, query, key) * dlse[0, 0][:, None]
    expected = 8**-0.5 * ds @ key[0, :, 0].astype(np.float64)
    np.testing.assert_allclose(grads.dq[0, :, 0], expected, **GRADIENTS_CLOSE)


@pytest.mark.parametrize("offset", [0, 2**40])
def test_s23_dropout_numbering(target: Target, offset: int) -> None:
    """Element (b, h, i, j) takes word n % 4 of Philox block offset + n / 4; a kept weight is scaled
    by 1 / (1 - p). Numbers past 2^32 and 2^34, one by one in Python's integers.
    """
    sizes = {"global_heads": 5, "head_start": 2, "global_queries": 2**33, "query_start": 2**33 - 3}
    sizes |= {"global_keys": 101, "key_start": 50}
    seed, p = 0x1234_5678_9ABC_DEF0, 0.375
    shard: Any = philox.DropoutShard(**sizes)
    if target.backend != "oracle":
        import flashattn as fa

        shard = fa.DropoutShard(**sizes)
    drop: dict[str, Any] = {"dropout_p": p, "dropout_seed": seed, "dropout_offset": offset}
    query, key = np.zeros((2, 3, 2, 1), np.float32), np.zeros((2, 8, 2, 1), np.float32)
    value = np.broadcast_to(np.eye(8, dtype=np.float32)[None, :, None], (2, 8, 2, 8))
    out, _ = target.forward(query, key, value, dropout_shard=shard, **drop)
    keep = target.function("dropout_mask")
    assert keep is not None
    name = "dropout_offset" if target.backend != "oracle" else "offset"
    factors = keep((2, 2, 3, 8), p, seed, **{name: offset, name.replace("offset", "shard"): shard})
    for b, h, i, j in np.ndindex(2, 2, 3, 8):
        n = ((b * 5 + 2 + h) * 2**33 + 2**33 - 3 + i) * 101 + 50 + j
        counter = offset + n // 4
        words = philox.philox4x32(
            tuple(np.array([c], np.uint64) for c in (counter & 0xFFFFFFFF, counter >> 32, 0, 0)),
            (seed & 0xFFFFFFFF, seed >> 32),
        )
        kept = (int(words[n % 4][0]) >> 8) * 2.0**-24 >= p
        assert (out[b, i, h, j] != 0) == kept
        assert np.float32(factors[b, h, i, j]) == np.float32(1 / (1 - p) if kept else 0)


def test_s24_dropout_of_nothing_and_of_all(target: Target) -> None:
    """p = 0 is bitwise the call without; p = 1 gives 0 to out and gradients; others are refused."""
    query, key, value, dout, _ = _one_head(3)
    plain = all_results(target, dout, query, key, value)
    none = all_results(target, dout, query, key, value, dropout_p=0.0, dropout_seed=7)
    assert_same_bits(none, plain)
    whole = all_results(target, dout, query, key, value, dropout_p=1.0, dropout_seed=7)
    assert np.isfinite(whole.pop("lse")).all()
    for name, result in whole.items():
        assert (result == 0).all(), name
    if refuses_wrong_arguments(target):
        for p in (-1e-9, 1.0000001, np.nan):
            with pytest.raises(ValueError, match="dropout_p"):
                target.forward(query, key, value, dropout_p=p, dropout_seed=7)


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_s25_mask_gradient(target: Target, dtype: str) -> None:
    """dS summed over the axes along which the mask is broadcast, in its shape; float32, or float64
    for a float64 mask; the same bits each time.
    """
    arrays = _one_head(5)
    query, key, value, dout, dlse = arrays
    for shape in ((5, 7), (1, 7), (5, 1), (7,), (1, 1, 5, 7), (1, 1, 1, 1)):
        mask = normal(8, *shape).astype(DTYPES.get(dtype, dtype))
        found = all_results(target, dout, query, key, value, dlse=dlse, mask=mask)["dmask"]
        assert found.dtype == (np.float64 if dtype == "float64" else np.float32)
        assert found.shape == shape
        ds = _score_gradients(target, arrays, mask=mask)
        over = tuple(a for a, n in enumerate((1, 1, *shape)[-2:]) if n == 1)
        expected = ds.sum(axis=over, keepdims=True).reshape(shape)
        np.testing.assert_allclose(found, expected, **GRADIENTS_CLOSE)
        again = all_results(target, dout, query, key, value, dlse=dlse, mask=mask)["dmask"]
        np.testing.assert_array_equal(again, found)


def test_s26_sink_gradient(target: Target) -> None:
    """-sum p_sink (dout . out) + sum p_sink dlse, with p_sink = exp(sink - lse)."""
    query, key, value, dout, dlse = _one_head(7)
    sinks = np.array([0.25], np.float32)
    found = all_results(target, dout, query, key, value, dlse=dlse, sinks=sinks)
    p = np.exp(0.25 - found["lse"][0, 0].astype(np.float64))
    expected = (p * (dlse[0, 0] - (dout * found["out"])[0, :, 0].sum(axis=-1))).sum()
    np.testing.assert_allclose(found["dsinks"], [expected], **GRADIENTS_CLOSE)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_s27_alibi_slope_gradient(target: Target, shape: tuple[int, ...]) -> None:
    """-sum dS |pos(i) - j|, in the slopes' shape."""
    arrays = _one_head(11)
    query, key, value, dout, dlse = arrays
    slopes = np.full(shape, 0.25, np.float32)
    found = all_results(target, dout, query, key, value, dlse=dlse, alibi_slopes=slopes)
    distance = np.abs(np.arange(5)[:, None] + 2 - np.arange(7))
    expected = -(_score_gradients(target, arrays, alibi_slopes=slopes) * distance).sum()
    assert found["dalibi_slopes"].shape == shape
    np.testing.assert_allclose(found["dalibi_slopes"].ravel(), [expected], **GRADIENTS_CLOSE)


def test_s28_dtypes_that_do_not_fit(target: Target) -> None:
    """query, key and value share one dtype, masks are bool or floating: TypeError names which."""
    if not refuses_wrong_arguments(target):
        return
    query, key, value, _, _ = _one_head(13)
    half = np.float16
    with pytest.raises(TypeError, match=r"key.*float16"):
        target.forward(query, key.astype(half), value)
    with pytest.raises(TypeError, match=r"value.*float16"):
        target.forward(query, key, value.astype(half))
    with pytest.raises(TypeError, match=r"query.*int32"):
        target.forward(*(x.astype(np.int32) for x in (query, key, value)))
    for kind in ("int64", "int32", "uint8"):
        with pytest.raises(TypeError, match=rf"mask.*{kind}"):
            target.forward(query, key, value, mask=np.ones((5, 7), kind))


def _views(x: np.ndarray) -> dict[str, np.ndarray]:
    """The same numbers under other strides."""
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    return {
        "reversed": x[:, ::-1, ::-1, ::-1].copy()[:, ::-1, ::-1, ::-1],
        "transposed": np.ascontiguousarray(x.transpose(3, 1, 2, 0)).transpose(3, 1, 2, 0),
        "every other": wide[..., ::2],
    }


def test_s29_strides(target: Target) -> None:
    """Any, for every input and dout: negative ones and 0 too; that of a size of 1 means nothing.
    Results are fresh and contiguous.
    """
    arrays = [normal(n, 2, t, 2, 8) for n, t in enumerate((5, 7, 7, 5))]
    plain = all_results(target, arrays[3], *arrays[:3])
    for result in plain.values():
        assert result.flags.c_contiguous
        assert not any(np.shares_memory(result, x) for x in arrays)
    for name in ("reversed", "transposed", "every other"):
        views = [_views(x)[name] for x in arrays]
        assert_same_bits(all_results(target, views[3], *views[:3]), plain)
    one = normal(9, 1, 7, 1, 8)
    shared = np.broadcast_to(one, (2, 7, 2, 8))
    assert_same_bits(
        all_results(target, arrays[3], arrays[0], shared, shared),
        all_results(target, arrays[3], arrays[0], shared.copy(), shared.copy()),
    )
    odd = np.lib.stride_tricks.as_strided(one, one.shape, (10**9, 32, -(10**9), 4))
    np.testing.assert_array_equal(
        target.forward(odd, odd, odd)[0], target.forward(one, one, one)[0]
    )
    if target.backend != "oracle":
        out, lse = np.empty((2, 5, 2, 8), np.float32), np.empty((2, 2, 5), np.float32)
        assert target.forward(*arrays[:3], out=(out, lse))[0] is out
        np.testing.assert_array_equal(out, plain["out"])


def test_s30_copies_are_counted(target: Target) -> None:
    """A layout may cost a copy, but never unseen: every byte is adopted or copied."""
    if target.backend == "oracle":
        return
    import flashattn as fa

    views = [_views(normal(n, 2, 20, 2, 8))["every other"] for n in range(3)]
    fa.copy_stats(reset=True)
    target.forward(*views)
    counts = fa.copy_stats()[target.backend]
    assert counts.adopted_bytes + counts.copied_bytes >= sum(4 * x.size for x in views)


def test_s31_determinism(target: Target) -> None:
    """The same bits run to run, for any number of threads and whoever else is in the batch."""
    arrays = [normal(n, 3, t, 2, 8) for n, t in enumerate((40, 70, 70, 40))]
    whole = all_results(target, arrays[3], *arrays[:3], causal=True)
    assert_same_bits(all_results(target, arrays[3], *arrays[:3], causal=True), whole)
    for b in range(3):
        one = [x[b : b + 1] for x in arrays]
        alone = all_results(target, one[3], *one[:3], causal=True)
        assert_same_bits(alone, {name: x[b : b + 1] for name, x in whole.items()})
    if target.backend == "cpu":
        import flashattn as fa

        before = fa.get_num_threads()
        try:
            for threads in (1, 3):
                fa.set_num_threads(threads)
                assert_same_bits(all_results(target, arrays[3], *arrays[:3], causal=True), whole)
        finally:
            fa.set_num_threads(before)


def test_s32_precision(target: Target) -> None:
    """float32 products keep 24 bits, and the scale is float32's whatever the arrays are."""
    key = np.array([1 + 2.0**-12, 1.0], np.float32).reshape(1, 2, 1, 1)  # 1, 1 in 11 bits
    one = np.ones((1, 1, 1, 1), np.float32)
    out, _ = check_arrays(target, one, key, identity(2), scale=2.0**10)
    assert abs(out[0, 0, 0, 0] - 1 / (1 + np.exp(-0.25))) < 1e-3
    query, half = np.full((1, 1, 1, 1), 64.0, np.float16), np.full((1, 1, 1, 1), 128.0, np.float16)
    _, lse = target.forward(query, half, half, scale=1 + 2.0**-13)  # 1 in float16
    assert lse.ravel()[0] == 8193.0


def test_s33_double_backward_is_an_error(target: Target) -> None:
    torch = pytest.importorskip("torch")
    if target.backend == "oracle":
        return
    import flashattn as fa

    tensors = [torch.from_numpy(normal(n, 1, 3, 1, 4)).requires_grad_() for n in range(3)]
    out = fa.attention(*tensors, backend=target.backend)
    (dq,) = torch.autograd.grad(out.square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(dq.sum(), tensors)


def test_s34_denormals_stay_on(target: Target) -> None:
    """In this thread behind a call, and in one that makes a call of its own."""
    tiny = np.finfo(np.float32).tiny

    def check() -> bool:
        target.forward(*(normal(n, 1, 4, 2, 4) for n in range(3)))
        return bool((np.full(64, tiny) * np.float32(0.5) > 0).all())

    answers = [check()]
    thread = threading.Thread(target=lambda: answers.append(check()))
    thread.start()
    thread.join()
    assert answers == [True, True]
