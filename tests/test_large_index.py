"""Numbers that do not fit 16 or 32 bits: more than 65,535 entries or heads, elements past number
2^31 of an array, and more than 2^32 scores.

Arrays are sparse files of which a few rows exist. Offsets of query, key, value and dout, forward
and backward, are test_c13 of test_known_faults.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import philox
import pytest
import reference
from score_calls import CLOSE, GRADIENTS_CLOSE, normal
from targets import Target

PAST = 2**31 + 2**20  # elements


def _is_simulated(target: Target) -> bool:
    """A thousand times slower: too slow for tens of thousands of threadgroups, whose grids are
    tests/cpp/test_metal_schedule.cpp's (grids_pass_65535).
    """
    if target.backend != "metal":
        return False
    from flashattn import _core

    return hasattr(_core, "set_simulated_metal")


def _file(path: Path, dtype: Any, *shape: int) -> np.ndarray:
    """Zeros that take no memory."""
    return np.memmap(path, dtype, "w+", shape=shape)


@pytest.mark.parametrize("sizes", [(65_541, 1), (1, 65_541)], ids=["batch", "heads"])
def test_more_than_65535(target: Target, sizes: tuple[int, int]) -> None:
    if _is_simulated(target):
        return
    batch, heads = sizes
    query, key, value = (normal(n, batch, t, heads, 4) for n, t in enumerate((1, 2, 2)))
    exact = reference.attention(query, key, value)
    out, lse = target.forward(query, key, value)
    np.testing.assert_allclose(out, exact.out, **CLOSE)
    np.testing.assert_allclose(lse, exact.lse, **CLOSE)
    dout = normal(3, batch, 1, heads, 4)
    expected = reference.attention_backward(dout, query, key, value)
    grads = target.backward(dout, query, key, value, out, lse)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(grads, name), getattr(expected, name), **GRADIENTS_CLOSE)


def test_cache_rows(target: Target, tmp_path: Path) -> None:
    """Rows appended and read past element 2^31 of a cache, and of pages."""
    function = target.function("attention_kvcache")
    if function is None or target.backend == "oracle":
        return
    half = np.float16
    first = PAST // 16
    query, new, filled = (normal(n, 1, t, 1, 16).astype(half) for n, t in enumerate((2, 2, 20)))
    compact = np.concatenate([filled, new], axis=1)
    expected = target.forward(query, compact, compact, causal=True)
    caches = [_file(tmp_path / f"{n}.bin", half, 1, first + 32, 1, 16) for n in range(2)]
    for cache in caches:
        cache[:, first : first + 20] = filled
    opts: dict[str, Any] = {"k": new, "v": new, "causal": True}
    got = function(query, *caches, cache_seqlens=[first + 20], leftpad=[first], **opts)
    for cache in caches:
        np.testing.assert_array_equal(cache[:, first + 20 : first + 22], new)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    pages = [_file(tmp_path / f"p{n}.bin", half, first // 16 + 2, 16, 1, 16) for n in range(2)]
    for page in pages:
        page[-1], page[-2, :4] = filled[0, :16], filled[0, 16:]
    table = np.array([[first // 16 + 1, first // 16]])
    got = function(query, *pages, cache_seqlens=[20], block_table=table, **opts)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_packed_keys(target: Target, tmp_path: Path) -> None:
    """A sequence behind one of 2^27 keys that nobody asks for."""
    function = target.function("attention_varlen")
    if function is None or target.backend == "oracle":
        return
    first = PAST // 16
    key = _file(tmp_path / "key.bin", np.float16, first + 7, 1, 16)
    key[first:] = normal(0, 7, 1, 16)
    query = normal(1, 5, 1, 16).astype(np.float16)
    starts = np.array([0, 0, 5]), np.array([0, first, first + 7])
    alone = np.array([0, 5]), np.array([0, 7])
    got = function(query, key, key, *starts, causal=True)
    few = key[first:].copy()
    for one, other in zip(got, function(query, few, few, *alone, causal=True), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["bool", "float16"])
@pytest.mark.parametrize("axis", [1, 2])
def test_masks(target: Target, tmp_path: Path, axis: int, kind: str) -> None:
    """A mask whose heads or rows lie 2^31 elements apart: the bits of its compact copy."""
    shape, dtype = (1, 2, 3, 20), np.dtype(kind)
    steps = [0, 60, 20, 1]
    steps[axis] = PAST
    flat = _file(tmp_path / "mask.bin", dtype, PAST * (shape[axis] - 1) + 200)
    mask = np.lib.stride_tricks.as_strided(flat, shape, [s * dtype.itemsize for s in steps])
    mask[...] = normal(5, *shape) > 0 if kind == "bool" else normal(5, *shape)
    query, key, value, dout = (normal(n, 1, t, 2, 8) for n, t in enumerate((3, 20, 20, 3)))

    def run(given: np.ndarray) -> list[Any]:
        out, lse = target.forward(query, key, value, mask=given)
        grads = target.backward(dout, query, key, value, out, lse, mask=given)
        return [out, lse, grads.dq, grads.dk, grads.dv, *([] if kind == "bool" else [grads.dmask])]

    for one, other in zip(run(mask), run(np.ascontiguousarray(mask)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_outputs_and_gradients_that_come_in(target: Target, tmp_path: Path) -> None:
    """out and lse written, lse and dlse read past element 2^31."""
    if target.backend == "oracle":
        return
    query, key, value, dout = (normal(n, 1, t, 2, 8) for n, t in enumerate((3, 20, 20, 3)))

    def far(name: str, shape: tuple[int, ...], axis: int) -> np.ndarray:
        flat = _file(tmp_path / f"{name}.bin", np.float32, PAST + 200)
        steps = [int(np.prod(shape[a + 1 :])) for a in range(len(shape))]
        steps[axis] = PAST // (shape[axis] - 1)
        return np.lib.stride_tricks.as_strided(flat, shape, [4 * s for s in steps])

    out, lse = far("out", (1, 3, 2, 8), 1), far("lse", (1, 2, 3), 1)
    dlse = far("dlse", (1, 2, 3), 2)
    dlse[...] = normal(7, 1, 2, 3)
    target.forward(query, key, value, out=(out, lse))
    expected = target.forward(query, key, value)
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(lse, expected[1])
    got = target.backward(dout, query, key, value, out, lse, dlse=dlse)
    want = target.backward(dout, query, key, value, *expected, dlse=np.ascontiguousarray(dlse))
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_more_than_32_bits_of_scores(target: Target) -> None:
    """70,000 rows and keys behind a window: dropout's numbers pass 2^32 without a shard's help."""
    if _is_simulated(target) or target.backend == "oracle":
        return  # the oracle would store them all; a shard's numbers: test_c05
    total, rows, keys = 70_000, 8, 11
    query, key, dout = (normal(n, 1, total, 1, 16) for n in range(3))
    value = np.eye(16, dtype=np.float32)[None, np.arange(total) % 16, None]
    drop: dict[str, Any] = {"dropout_p": 0.5, "dropout_seed": 9, "window": (3, 0)}
    out, lse = target.forward(query, key, value, **drop)
    grads = target.backward(dout, query, key, value, out, lse, **drop)
    keep = philox.dropout_mask(
        (1, 1, rows, keys),
        0.5,
        9,
        0,
        philox.DropoutShard(1, 0, total, total - rows, total, total - keys),
    )[0, 0]
    for i in range(rows):
        for j in range(i, i + 4):  # the four keys of the window, each in a column of its own
            weight = out[0, total - rows + i, 0, (total - keys + j) % 16]
            assert (weight != 0) == (keep[i, j] != 0)
    import flashattn as fa

    shard = fa.DropoutShard(1, 0, total, total - rows, total, total - keys)
    last = [x[:, -n:] for x, n in ((query, rows), (key, keys), (value, keys))]
    part, part_lse = target.forward(*last, dropout_shard=shard, **drop)
    np.testing.assert_allclose(part, out[:, -rows:], **CLOSE)
    few = target.backward(dout[:, -rows:], *last, part, part_lse, dropout_shard=shard, **drop)
    np.testing.assert_allclose(few.dq, grads.dq[:, -rows:], **GRADIENTS_CLOSE)
    np.testing.assert_allclose(few.dv[:, 3:], grads.dv[:, -rows:], **GRADIENTS_CLOSE)
