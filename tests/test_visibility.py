"""Which keys a row sees: causal both ways, windows, offsets, lengths, and chunks that add up to the
whole.

With value = identity and equal scores the output shows the visible set itself, so the sets are
compared exactly; numbers are compared with the oracle as everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
import reference_packed
from cases import Case, build, check_backward, check_forward
from targets import Target

CAUSAL = (False, True, "top_left")
LENGTHS = [(1, 1), (5, 9), (9, 5), (40, 70), (70, 40), (64, 64), (129, 128)]
WINDOWS = [
    (0, 0),
    (3, 0),
    (0, 3),
    (2, 5),
    (-1, 4),
    (7, -1),
    (-1, -1),
    (1000, 1000),
    (64, 0),
    (0, 64),
]


def _visible_set(
    target: Target, seqlen_q: int, seqlen_k: int, batch: int = 1, **opts: Any
) -> np.ndarray:
    """(batch, Tq, Tk) bool, as the backend sees it."""
    query = np.zeros((batch, seqlen_q, 1, 4), np.float32)
    key = np.zeros((batch, seqlen_k, 1, 4), np.float32)
    eye = np.broadcast_to(
        np.eye(seqlen_k, dtype=np.float32)[None, :, None, :], (batch, seqlen_k, 1, seqlen_k)
    ).copy()
    out, lse = target.forward(query, key, eye, **opts)
    visible = out[:, :, 0, :] != 0
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[:, 0], np.log(visible.sum(-1)), atol=1e-6)
    return visible


def _expected_set(seqlen_q: int, seqlen_k: int, batch: int = 1, **opts: Any) -> np.ndarray:
    return reference.visibility(batch, seqlen_q, seqlen_k, reference.Options(**opts))[:, 0]


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_window_and_causal(
    target: Target, lengths: tuple[int, int], window: tuple[int, int], causal: bool | str
) -> None:
    opts = {"causal": causal, "window": window}
    np.testing.assert_array_equal(
        _visible_set(target, *lengths, **opts), _expected_set(*lengths, **opts)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(3, 1), (-1, 2), (9, -1)], ids=str)
@pytest.mark.parametrize(
    "offsets", [(0, 0), (7, 0), (0, 7), (100, 90), (-5, 0), (3, -4), (2**40, 2**40 - 3)], ids=str
)
def test_offsets(
    target: Target, offsets: tuple[int, int], window: tuple[int, int], causal: bool
) -> None:
    opts = {"causal": causal, "window": window, "q_offset": offsets[0], "k_offset": offsets[1]}
    np.testing.assert_array_equal(
        _visible_set(target, 13, 37, **opts), _expected_set(13, 37, **opts)
    )


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("window", [None, (4, 2), (-1, 0), (3, -1)], ids=str)
def test_lengths(target: Target, window: tuple[int, int] | None, causal: bool | str) -> None:
    """Every length from none to all; the rows of an entry align with its own length."""
    lengths = np.array([0, 1, 5, 12, 13, 36, 37], np.int32)
    opts: dict[str, Any] = {"causal": causal, "kv_lengths": lengths}
    if window is not None:
        opts["window"] = window
    np.testing.assert_array_equal(
        _visible_set(target, 13, 37, batch=7, **opts), _expected_set(13, 37, batch=7, **opts)
    )


def test_offset_per_batch_entry(target: Target) -> None:
    opts = {"causal": True, "window": (6, -1), "q_offset": np.array([0, 9, -3, 50]), "k_offset": 2}
    np.testing.assert_array_equal(
        _visible_set(target, 13, 37, batch=4, **opts), _expected_set(13, 37, batch=4, **opts)
    )


NUMBERS = {
    "window": {"window": (9, 4)},
    "window_causal": {"window": (20, -1), "causal": True},
    "window_top_left": {"window": (5, 5), "causal": "top_left"},
    "lengths": {"kv_lengths": (70, 1, 33), "causal": True},
    "lengths_short": {"kv_lengths": (10, 0, 41), "window": (16, 3)},
    "offsets": {"q_offset": (3, 60, -20), "k_offset": 5, "causal": True},
    "everything": {
        "q_offset": (30, 45, 5),
        "k_offset": 2,
        "causal": True,
        "window": (25, -1),
        "kv_lengths": (66, 70, 9),
    },
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(target: Target, name: str, dtype: str) -> None:
    """Forward and backward with dlse on problems where every kind of tile occurs."""
    case = replace(Case(3, 4, 2, 41, 70, 20, 24, dtype=dtype), **NUMBERS[name])
    check_forward(target, case)
    check_backward(target, case)


@pytest.mark.parametrize("window", [(-1, -1), (300, 0), (20, -1)], ids=str)
def test_many_tiles(target: Target, window: tuple[int, int]) -> None:
    """Long enough that whole tiles are skipped, full and mixed in both passes."""
    case = Case(1, 2, 1, 333, 401, 16, causal=True, window=window)
    check_forward(target, case)
    check_backward(target, case)


@pytest.mark.parametrize("window", [(-1, -1), (11, -1)], ids=str)
def test_query_chunks_are_the_whole(target: Target, window: tuple[int, int]) -> None:
    """Chunked prefill: rows in pieces, each with its q_offset, give the rows of the whole call."""
    problem = build(Case(2, 4, 2, 50, 50, 16, causal=True, window=window))
    query, key, value = problem.inputs
    whole = target.forward(query, key, value, causal=True, window=window)
    for begin, end in ((0, 1), (1, 18), (18, 50)):
        out, lse = target.forward(
            query[:, begin:end],
            key[:, :end],
            value[:, :end],
            causal=True,
            window=window,
            q_offset=begin,
        )
        np.testing.assert_allclose(out, whole[0][:, begin:end], atol=2e-6)
        np.testing.assert_allclose(lse, whole[1][:, :, begin:end], atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_key_chunks_merge_to_the_whole(target: Target, causal: bool) -> None:
    """Ring attention: keys in pieces with k_offset, merged by their LSE, are the whole; dead pieces
    too.
    """
    problem = build(Case(2, 4, 2, 50, 50, 16, causal=causal))
    query, key, value = problem.inputs
    parts = [
        target.forward(query, key[:, b:e], value[:, b:e], causal=causal, q_offset=0, k_offset=b)
        for b, e in ((0, 7), (7, 7), (7, 40), (40, 50))
    ]
    out, lse = reference_packed.merge_attention([p[0] for p in parts], [p[1] for p in parts])
    np.testing.assert_allclose(out, problem.oracle.out, atol=2e-6)
    np.testing.assert_allclose(lse, problem.oracle.lse, atol=2e-6)


def test_key_chunks_of_backward_sum_to_the_whole(target: Target) -> None:
    """Given the whole row's out and lse, the pieces' dq add up, and dk, dv are the whole's own
    rows.
    """
    problem = build(Case(1, 4, 2, 50, 50, 16, causal=True))
    query, key, value = problem.inputs
    out, lse = target.forward(*problem.inputs, causal=True)
    if target.backend == "oracle":
        return  # recomputes its own lse, so it cannot take the whole's
    dq = np.zeros(query.shape)
    for b, e in ((0, 7), (7, 40), (40, 50)):
        part = target.backward(
            problem.dout,
            query,
            key[:, b:e],
            value[:, b:e],
            out,
            lse,
            dlse=problem.dlse,
            causal=True,
            q_offset=0,
            k_offset=b,
        )
        dq += part.dq
        np.testing.assert_allclose(part.dk, problem.oracle_gradients.dk[:, b:e], atol=1e-5)
        np.testing.assert_allclose(part.dv, problem.oracle_gradients.dv[:, b:e], atol=1e-5)
    np.testing.assert_allclose(dq, problem.oracle_gradients.dq, atol=1e-5)


@pytest.mark.parametrize("window", [(-2, 0), (0, -2), (-(2**40), 0)], ids=str)
def test_window_below_minus_one(target: Target, window: tuple[int, int]) -> None:
    if target.backend == "oracle":
        return
    problem = build(Case(1, 1, 1, 3, 3, 4))
    with pytest.raises(ValueError, match="window"):
        target.forward(*problem.inputs, window=window)


@pytest.mark.parametrize("window", [(1.0, 0), ("1", 0), (None, 0), (1,), 3], ids=str)
def test_window_that_is_no_pair_of_ints(target: Target, window: Any) -> None:
    if target.backend == "oracle":
        return
    problem = build(Case(1, 1, 1, 3, 3, 4))
    with pytest.raises(ValueError, match="window"):
        target.forward(*problem.inputs, window=window)


def test_window_is_compared_in_64_bits(target: Target) -> None:
    """Bounds of 2^31 and more exclude nothing; a 32-bit sum would wrap and exclude all."""
    for big in (2**31 - 1, 2**31, 2**40, 2**62):
        assert _visible_set(target, 5, 7, window=(big, big)).all()
