"""fa.dropout_mask and fa.alibi_slopes: what a call draws or is given, alone."""

from __future__ import annotations

from typing import Any

import flashattn as fa
import numpy as np
import philox
import pytest
from targets import Target

SHAPE = (2, 3, 17, 29)


def test_is_the_generators(target: Target) -> None:
    for p in (0.1, 0.5, 1 - 2**-24):
        mask = fa.dropout_mask(SHAPE, p, 2**63 + 5, dropout_offset=2**64 - 3)
        expected = philox.dropout_mask(SHAPE, p, 2**63 + 5, 2**64 - 3)
        assert mask.dtype == np.float32
        np.testing.assert_array_equal(mask != 0, expected != 0)
        np.testing.assert_array_equal(mask[mask != 0], np.float32(1 / (1 - p)))


def test_is_what_a_call_multiplies_by(target: Target) -> None:
    """Equal scores and value = identity: out is mask / seqlen_k."""
    query = np.zeros((2, 17, 3, 4), np.float32)
    key = np.zeros((2, 29, 3, 4), np.float32)
    value = np.broadcast_to(np.eye(29, dtype=np.float32)[None, :, None, :], (2, 29, 3, 29))
    opts: dict[str, Any] = {"dropout_p": 0.3, "dropout_seed": 11, "dropout_offset": 7}
    if target.refuses(lambda: target.forward(query, key, value, **opts), opts):
        return
    out, _ = target.forward(query, key, value, **opts)
    mask = fa.dropout_mask(SHAPE, 0.3, 11, 7)
    np.testing.assert_array_equal(out.transpose(0, 2, 1, 3) != 0, mask != 0)
    np.testing.assert_allclose(29 * out.transpose(0, 2, 1, 3), mask, rtol=1e-6)


@pytest.mark.parametrize("start", [(0, 0, 0), (1, 4, 8), (2, 3, 5), (0, 9, 31)], ids=str)
def test_a_shard_is_a_piece_of_the_whole(target: Target, start: tuple[int, int, int]) -> None:
    """Whatever the alignment of its first key in the generator's blocks of four."""
    whole = fa.dropout_mask((1, 5, 20, 50), 0.4, 3)
    h, i, j = start
    shard = fa.DropoutShard(5, h, 20, i, 50, j)
    piece = fa.dropout_mask((1, 2, 7, 13), 0.4, 3, dropout_shard=shard)
    np.testing.assert_array_equal(piece, whole[:, h : h + 2, i : i + 7, j : j + 13])


def test_none_and_all(target: Target) -> None:
    np.testing.assert_array_equal(fa.dropout_mask(SHAPE, 0.0, 3), 1)
    np.testing.assert_array_equal(fa.dropout_mask(SHAPE, 1.0, 3), 0)
    assert fa.dropout_mask((0, 3, 4, 5), 0.5, 1).shape == (0, 3, 4, 5)
    assert fa.dropout_mask((1, 3, 4, 0), 0.5, 1).size == 0


def test_any_number_of_threads(target: Target) -> None:
    threads = fa.get_num_threads()
    masks = []
    try:
        for count in (1, 3):
            fa.set_num_threads(count)
            masks.append(fa.dropout_mask((2, 4, 100, 333), 0.5, 8))
    finally:
        fa.set_num_threads(threads)
    np.testing.assert_array_equal(*masks)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((SHAPE[:3], 0.5, 1), ValueError, r"shape .* must be 4 ints"),
        ((7, 0.5, 1), TypeError, r"shape \(7\) must be 4 ints"),
        (((1, 1, -1, 2), 0.5, 1), ValueError, r"shape \(-1\) must be between 0"),
        (((1, 1, 2.5, 2), 0.5, 1), TypeError, r"shape \(2.5\) must be an int"),
        ((SHAPE, 1.5, 1), ValueError, r"dropout_p \(1.5\) must be between 0 and 1"),
        ((SHAPE, float("nan"), 1), ValueError, "dropout_p"),
        ((SHAPE, "0.5", 1), TypeError, "dropout_p"),
        ((SHAPE, 0.5, -1), ValueError, "dropout_seed"),
        ((SHAPE, 0.5, 1, 2**64), ValueError, "dropout_offset"),
        ((SHAPE, 0.5, 1, 0, (3, 0, 17, 0, 29, 0)), TypeError, "dropout_shard"),
        (
            (SHAPE, 0.5, 1, 0, fa.DropoutShard(3, 1, 17, 0, 29, 0)),
            ValueError,
            r"dropout_shard.head_start \(1\) must place 3 inside the global 3",
        ),
    ],
)
def test_errors(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"dropout_mask: {text}"):
        fa.dropout_mask(*arguments)


def test_slopes() -> None:
    """The paper's, for counts that are and are not a power of two."""
    np.testing.assert_array_equal(fa.alibi_slopes(1), np.float32([2**-8]))
    np.testing.assert_array_equal(fa.alibi_slopes(4), np.float32([2**-2, 2**-4, 2**-6, 2**-8]))
    six = fa.alibi_slopes(6)
    assert six.dtype == np.float32
    np.testing.assert_array_equal(six, np.float32([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]))
    np.testing.assert_allclose(fa.alibi_slopes(16)[0], 2**-0.5, rtol=1e-7)
    assert fa.alibi_slopes(np.int64(65)).shape == (65,)
    for wrong, error in ((0, ValueError), (-4, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="alibi_slopes: num_heads"):
            fa.alibi_slopes(wrong)  # type: ignore[arg-type]
