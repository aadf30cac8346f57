"""The oracle itself: finite differences, torch in float64, known answers, and the rules on excluded
positions.

Nothing here calls the package. Finite differences are central with a step of 1e-6 on float64, so
1e-7 agreement is what the arithmetic gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import philox
import pytest
import reference
import reference_packed
from reference import DropoutShard

# name -> options; every option alone, then combinations. B=2, H=4, Hkv=2, Tq=3, Tk=5, D=4, Dv=3.
SHAPE = {
    "batch": 2,
    "heads": 4,
    "kv_heads": 2,
    "seqlen_q": 3,
    "seqlen_k": 5,
    "head_dim": 4,
    "value_dim": 3,
}
_RNG = np.random.default_rng(7)
_SLOPES = _RNG.uniform(0.05, 0.5, (2, 4))
_MASK = _RNG.standard_normal((1, 4, 1, 5))
_HOLES = np.where(_RNG.random((2, 1, 3, 5)) < 0.3, -np.inf, _RNG.standard_normal((2, 1, 3, 5)))
_BOOL = _RNG.random((4, 3, 5)) < 0.7
_SINKS = _RNG.standard_normal(4)
_SHARD = DropoutShard(8, 3, 12, 5, 20, 7)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.9},
    "scale_negative": {"scale": -1.3},
    "scale_zero": {"scale": 0.0},
    "causal": {"causal": True},
    "causal_top_left": {"causal": "top_left"},
    "window": {"window": (1, 0)},
    "window_left": {"window": (1, -1)},
    "window_right": {"window": (-1, 1)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": _SLOPES[0]},
    "alibi_batch": {"alibi_slopes": _SLOPES},
    "mask_bool": {"mask": _BOOL},
    "mask_additive": {"mask": _MASK},
    "mask_holes": {"mask": _HOLES},
    "sinks": {"sinks": _SINKS},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 11},
    "q_offset": {"causal": True, "q_offset": 1, "k_offset": 0},
    "q_offset_batch": {"causal": True, "q_offset": [0, 4], "k_offset": 2},
    "kv_lengths": {"causal": True, "kv_lengths": [4, 2]},
    "dead_rows": {"causal": True, "q_offset": -2, "sinks": _SINKS},
    "dead_rows_no_sink": {"causal": True, "q_offset": -2},
    "softcap+alibi+mask": {"softcap": 2.0, "alibi_slopes": _SLOPES, "mask": _MASK, "causal": True},
    "window+sinks+dropout": {
        "window": (2, 1),
        "sinks": _SINKS,
        "dropout_p": 0.4,
        "dropout_seed": 2**40 + 5,
        "dropout_shard": _SHARD,
    },
    "everything": {
        "scale": 0.8,
        "softcap": 1.7,
        "alibi_slopes": _SLOPES,
        "mask": _HOLES,
        "causal": True,
        "window": (3, 0),
        "kv_lengths": [5, 3],
        "q_offset": [2, 1],
        "sinks": _SINKS,
        "dropout_p": 0.25,
        "dropout_seed": 3,
        "dropout_offset": 9,
    },
}


def _inputs(seed: int = 0, **shape: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    s = {**SHAPE, **shape}
    return {
        "query": rng.standard_normal((s["batch"], s["seqlen_q"], s["heads"], s["head_dim"])),
        "key": rng.standard_normal((s["batch"], s["seqlen_k"], s["kv_heads"], s["head_dim"])),
        "value": rng.standard_normal((s["batch"], s["seqlen_k"], s["kv_heads"], s["value_dim"])),
    }


def _finite_difference(loss: Any, x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        if not np.isfinite(x[index]):
            continue  # -inf excludes; its gradient is defined as 0
        sides = []
        for sign in (1, -1):
            moved = x.copy()
            moved[index] += sign * step
            sides.append(loss(moved))
        gradient[index] = (sides[0] - sides[1]) / (2 * step)
    return gradient


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_match_finite_differences(name: str) -> None:
    opts = OPTIONS[name]
    arrays = _inputs()
    rng = np.random.default_rng(1)
    forward = reference.attention(**arrays, **opts)
    dout = rng.standard_normal(forward.out.shape)
    dlse = rng.standard_normal(forward.lse.shape)
    grads = reference.attention_backward(dout, **arrays, dlse=dlse, **opts)

    def loss(changed: dict[str, Any]) -> float:
        result = reference.attention(**{**arrays, **opts, **changed})
        alive = np.isfinite(result.lse)
        return float((dout * result.out).sum() + (dlse[alive] * result.lse[alive]).sum())

    checked = {
        "query": grads.dq,
        "key": grads.dk,
        "value": grads.dv,
        "alibi_slopes": grads.dalibi_slopes,
        "sinks": grads.dsinks,
        "mask": grads.dmask,
    }
    for argument, analytic in checked.items():
        if analytic is None:
            continue
        x = np.asarray({**arrays, **opts}[argument], np.float64)
        numeric = _finite_difference(lambda moved, a=argument: loss({a: moved}), x)
        np.testing.assert_allclose(
            analytic, numeric, rtol=1e-6, atol=2e-8, err_msg=f"{name}: {argument}"
        )


@pytest.mark.parametrize(
    "name", ["plain", "scale", "scale_negative", "causal_top_left", "mask_bool", "mask_additive"]
)
def test_agrees_with_torch_in_float64(name: str) -> None:
    torch = pytest.importorskip("torch")
    opts = dict(OPTIONS[name])
    arrays = _inputs(3)
    dout = np.random.default_rng(4).standard_normal((2, 3, 4, 3))
    tensors = [
        torch.tensor(arrays[n].transpose(0, 2, 1, 3), requires_grad=True)
        for n in ("query", "key", "value")
    ]
    mask = opts.get("mask")
    out = torch.nn.functional.scaled_dot_product_attention(
        *tensors,
        attn_mask=None
        if mask is None
        else torch.tensor(np.broadcast_to(mask, (2, 4, 3, 5)).copy()),
        is_causal=opts.get("causal") == "top_left",
        scale=opts.get("scale"),
        enable_gqa=True,
    )
    expected = torch.autograd.grad(out, tensors, torch.tensor(dout.transpose(0, 2, 1, 3)))
    ours = reference.attention(**arrays, **opts)
    grads = reference.attention_backward(dout, **arrays, **opts)
    np.testing.assert_allclose(ours.out, out.detach().numpy().transpose(0, 2, 1, 3), atol=1e-13)
    for mine, theirs in zip((grads.dq, grads.dk, grads.dv), expected, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy().transpose(0, 2, 1, 3), atol=1e-13)


@pytest.mark.parametrize(
    ("rounds", "counter", "key", "words"),
    [
        (10, (0,) * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            10,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
        (7, (0,) * 4, (0, 0), "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (7, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (
            7,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ],
)
def test_philox_known_answers(
    rounds: int, counter: tuple[int, ...], key: tuple[int, int], words: str
) -> None:
    got = philox.philox4x32(tuple(np.array([c], np.uint64) for c in counter), key, rounds)
    assert " ".join(f"{int(w[0]):08x}" for w in got) == words


def test_dropout_of_a_shard_is_the_whole_masks_tile() -> None:
    whole = philox.dropout_mask((2, 4, 12, 9), 0.3, 77, 5)
    tile = philox.dropout_mask((2, 2, 5, 4), 0.3, 77, 5, DropoutShard(4, 1, 12, 6, 9, 3))
    np.testing.assert_array_equal(tile, whole[:, 1:3, 6:11, 3:7])


def test_dropout_numbering_is_64_bit() -> None:
    far = DropoutShard(1, 0, 1 << 20, (1 << 20) - 2, 1 << 20, (1 << 20) - 8)
    index = philox.element_index((1, 1, 2, 8), far)
    assert int(index[0, 0, 1, 7]) == (1 << 40) - 1
    tile = philox.dropout_mask((1, 1, 2, 8), 0.5, 1, 0, far)
    assert not np.array_equal(tile, philox.dropout_mask((1, 1, 2, 8), 0.5, 1))


def test_dropout_rate_is_not_quantised() -> None:
    keep = philox.dropout_mask((1, 1, 2048, 2048), 0.17, 3)
    sigma = np.sqrt(0.17 * 0.83 / keep.size)
    assert abs((keep == 0).mean() - 0.17) < 5 * sigma
    assert abs(keep.mean() - 1.0) < 5 * sigma / 0.83


def test_value_identity_returns_the_probabilities() -> None:
    arrays = _inputs(5)
    arrays["value"] = np.broadcast_to(np.eye(5)[None, :, None, :], (2, 5, 2, 5))
    result = reference.attention(**arrays, causal=True)
    np.testing.assert_array_equal(result.out.transpose(0, 2, 1, 3), result.probabilities)
    np.testing.assert_allclose(result.probabilities.sum(-1), 1.0, atol=1e-15)


def test_known_answers_of_causal() -> None:
    def run(seqlen_q: int, seqlen_k: int) -> reference.Result:
        value = np.arange(seqlen_k, dtype=float).reshape(1, -1, 1, 1)
        return reference.attention(
            np.zeros((1, seqlen_q, 1, 1)), np.zeros((1, seqlen_k, 1, 1)), value, causal=True
        )

    np.testing.assert_allclose(run(2, 5).out.ravel(), [1.5, 2.0])
    longer = run(5, 2)
    np.testing.assert_array_equal(longer.out.ravel(), [0, 0, 0, 0, 0.5])
    np.testing.assert_allclose(longer.lse.ravel(), [-np.inf] * 3 + [0.0, np.log(2.0)])


def test_finite_mask_value_is_a_value() -> None:
    arrays = _inputs(6)
    lowest = np.full((1, 1, 1, 5), np.finfo(np.float32).min)
    mean = np.repeat(arrays["value"].mean(axis=1, keepdims=True), 2, axis=2)
    out = reference.attention(**arrays, mask=lowest).out
    np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), rtol=1e-6)


def test_dead_row_has_zero_output_and_gradients() -> None:
    arrays = _inputs(7)
    mask = np.ones((1, 1, 3, 5), bool)
    mask[..., 1, :] = False
    ones = np.ones((2, 3, 4, 3))
    result = reference.attention(**arrays, mask=mask)
    grads = reference.attention_backward(ones, **arrays, dlse=np.ones((2, 4, 3)), mask=mask)
    assert (result.out[:, 1] == 0).all()
    assert np.isneginf(result.lse[:, :, 1]).all()
    assert (grads.dq[:, 1] == 0).all()
    sunk = reference.attention(**arrays, mask=mask, sinks=_SINKS)
    np.testing.assert_allclose(sunk.lse[:, :, 1], np.broadcast_to(_SINKS, (2, 4)))


def test_nan_at_excluded_positions_is_selected_away() -> None:
    arrays = _inputs(8)
    opts = {"causal": True, "kv_lengths": [4, 3]}
    dout = np.random.default_rng(2).standard_normal((2, 3, 4, 3))
    clean = (
        reference.attention(**arrays, **opts),
        reference.attention_backward(dout, **arrays, **opts),
    )
    stale = {n: x.copy() for n, x in arrays.items()}
    for b, length in enumerate(opts["kv_lengths"]):
        stale["key"][b, length:], stale["value"][b, length:] = np.nan, np.inf
    dirty = (
        reference.attention(**stale, **opts),
        reference.attention_backward(dout, **stale, **opts),
    )
    np.testing.assert_array_equal(dirty[0].out, clean[0].out)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(dirty[1], name), getattr(clean[1], name))


def test_nan_in_a_visible_key_stays_in_the_rows_that_see_it() -> None:
    arrays = _inputs(9, batch=1, seqlen_q=5)
    arrays["key"][0, 3, 0] = np.nan
    bad = np.isnan(reference.attention(**arrays, causal=True).out).any(axis=-1)[0]
    np.testing.assert_array_equal(
        bad, np.array([[i >= 3 and h < 2 for h in range(4)] for i in range(5)])
    )


def test_merge_of_disjoint_keys_is_the_whole() -> None:
    arrays = _inputs(10)
    whole = reference.attention(**arrays, causal=True)
    parts = []
    for begin, end in ((0, 2), (2, 2), (2, 5)):
        part = {
            **arrays,
            "key": arrays["key"][:, begin:end],
            "value": arrays["value"][:, begin:end],
        }
        parts.append(reference.attention(**part, causal=True, q_offset=2, k_offset=begin))
    out, lse = reference_packed.merge_attention([p.out for p in parts], [p.lse for p in parts])
    np.testing.assert_allclose(out, whole.out, atol=1e-14)
    np.testing.assert_allclose(lse, whole.lse, atol=1e-14)
    dead = reference_packed.merge_attention([whole.out] * 2, [np.full_like(whole.lse, -np.inf)] * 2)
    assert (dead[0] == 0).all()
    assert np.isneginf(dead[1]).all()


def test_varlen_is_each_sequence_alone() -> None:
    rng = np.random.default_rng(11)
    q, k, v = (
        rng.standard_normal((9, 4, 4)),
        rng.standard_normal((12, 2, 4)),
        rng.standard_normal((12, 2, 3)),
    )
    cu_q, cu_k = [0, 0, 5, 9, 9], [0, 4, 4, 8, 12]
    out, lse = reference_packed.attention_varlen(q, k, v, cu_q, cu_k, causal=True)
    alone = reference.attention(q[None, 5:9], k[None, 4:8], v[None, 4:8], causal=True)
    np.testing.assert_array_equal(out[5:9], alone.out[0])
    assert (out[:5] == 0).all()
    assert np.isneginf(lse[:, :5]).all()
    grads = reference_packed.attention_varlen_backward(
        np.ones_like(out), q, k, v, cu_q, cu_k, causal=True
    )
    assert (grads.dk[:4] == 0).all()
    assert (grads.dk[8:] == 0).all()
    assert (grads.dv[8:] == 0).all()


def test_paged_cache_is_the_flat_cache() -> None:
    rng = np.random.default_rng(12)
    q, new_k, new_v = (rng.standard_normal((2, 2, 2, 4)) for _ in range(3))
    k_cache, v_cache = (rng.standard_normal((2, 8, 2, 4)) for _ in range(2))
    flat, keys, _ = reference_packed.attention_kvcache(
        q, k_cache, v_cache, cache_seqlens=[3, 5], k=new_k, v=new_v, causal=True
    )
    table = np.array([[2, 0, 5, 1], [7, 3, 4, 6]])
    paged_k, paged_v = np.full((8, 2, 2, 4), np.nan), np.full((8, 2, 2, 4), np.nan)
    for b in range(2):
        for page in range(4):
            paged_k[table[b, page]] = k_cache[b, 2 * page : 2 * page + 2]
            paged_v[table[b, page]] = v_cache[b, 2 * page : 2 * page + 2]
    paged, pages, _ = reference_packed.attention_kvcache(
        q, paged_k, paged_v, cache_seqlens=[3, 5], k=new_k, v=new_v, block_table=table, causal=True
    )
    np.testing.assert_array_equal(paged.out, flat.out)
    np.testing.assert_array_equal(keys[0, 3:5], new_k[0])
    np.testing.assert_array_equal(pages[table[1, 2], 1], new_k[1, 0])


def test_alibi_slopes_for_counts_that_are_no_power_of_two() -> None:
    np.testing.assert_array_equal(
        reference_packed.alibi_slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    )
