"""What attention_kvcache refuses: each time before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_kvcache import CAUSAL, Cache, run

fa = pytest.importorskip("flashattn")


REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cache_seqlens": [5, 95]}, ValueError, r"cache_seqlens\[1\] \(95\) must be between 0 and 94"),
    ({"cache_seqlens": [-1, 9]}, ValueError, r"cache_seqlens\[0\] \(-1\) must be between"),
    ({"cache_seqlens": [5]}, ValueError, r"cache_seqlens.shape .* must be \(2,\)"),
    ({"cache_seqlens": None}, ValueError, "cache_seqlens"),
    ({"v": None}, ValueError, r"v \(not given\) must come with the other"),
    ({"k": np.zeros((2, 3, 2, 16), np.float32)}, ValueError, "shape"),
    ({"k": np.zeros((2, 2, 2, 16), np.float16)}, TypeError, r"k\.dtype .* k_cache\.dtype"),
    ({"cache_batch_idx": [1, 1]}, ValueError, "cache_batch_idx .*a place of its own"),
    ({"cache_batch_idx": [0, 2]}, ValueError, r"cache_batch_idx\[1\] \(2\)"),
    ({"leftpad": [6, 0]}, ValueError, r"leftpad\[0\] \(6\) must be between 0 and 5"),
    ({"kv_lengths": [1, 1]}, ValueError, "kv_lengths"),
    ({"rotary_sin": np.zeros((96, 8), np.float32)}, ValueError, "rotary_cos"),
    (
        {n: np.zeros((20, 8), np.float32) for n in ("rotary_cos", "rotary_sin")},
        ValueError,
        r"rotary_cos.positions \(20\) must be at least 92",
    ),
    (
        {n: np.zeros((96, 9), np.float32) for n in ("rotary_cos", "rotary_sin")},
        ValueError,
        r"rotary_cos.pairs \(9\)",
    ),
    ({"window": (-2, 0)}, ValueError, "window"),
    ({"backend": "nowhere"}, ValueError, "nowhere"),
    ({"softcap": -1.0}, ValueError, "softcap"),
]


@pytest.mark.parametrize(("change", "kind", "text"), REFUSALS)
def test_refusals_write_nothing(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    call = Cache((5, 90), new=2, seqlen_q=2, options=CAUSAL).arrays()
    before = call["k_cache"].copy(), call["v_cache"].copy()
    with pytest.raises(kind, match=r"attention_kvcache: .*" + text):
        run(fa.attention_kvcache, call | change)
    np.testing.assert_array_equal(call["k_cache"], before[0])
    np.testing.assert_array_equal(call["v_cache"], before[1])


def _sized(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


WRONG_CACHES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k_cache": _sized(2, 96, 2, 8)}, ValueError, r"k_cache\.head_dim \(8\)"),
    ({"v_cache": _sized(2, 95, 2, 16)}, ValueError, r"v_cache\.seqlen \(95\) .*k_cache\.seqlen"),
    ({"v_cache": _sized(2, 96, 4, 16)}, ValueError, r"v_cache\.heads \(4\) .*k_cache\.heads"),
    ({"k_cache": _sized(3, 96, 2, 16)}, ValueError, r"k_cache\.batch \(3\)"),
    ({"v_cache": _sized(3, 96, 2, 16)}, ValueError, r"v_cache\.batch \(3\)"),
    (
        {"k_cache": _sized(2, 96, 3, 16), "v_cache": _sized(2, 96, 3, 16)},
        ValueError,
        r"query\.heads \(4\) .*k_cache\.heads \(3\)",
    ),
    ({"k_cache": _sized(2, 96, 2, 16, dtype=np.float16)}, TypeError, r"k_cache\.dtype \(float16\)"),
    ({"v_cache": _sized(2, 96, 2, 16, dtype=np.float16)}, TypeError, r"v_cache\.dtype \(float16\)"),
    ({"k_cache": _sized(2, 96, 16)}, ValueError, r"k_cache\.ndim \(3\)"),
    ({"k_cache": [1.0]}, TypeError, r"k_cache \(list\)"),
    ({"v_cache": [1.0]}, TypeError, r"v_cache \(list\)"),
]


@pytest.mark.parametrize(("change", "kind", "text"), WRONG_CACHES)
def test_caches_go_by_their_own_names(
    change: dict[str, Any], kind: type[Exception], text: str
) -> None:
    call = Cache((5, 90), seqlen_q=2, options=CAUSAL).arrays()
    with pytest.raises(kind, match="attention_kvcache: " + text):
        run(fa.attention_kvcache, call | change)


def test_an_output_that_overlaps_a_cache_names_the_cache() -> None:
    call = Cache((5, 90), seqlen_q=2, options=CAUSAL).arrays()
    for name in ("k_cache", "v_cache"):
        shared = call[name].reshape(-1)[: call["query"].size].reshape(call["query"].shape)
        with pytest.raises(ValueError, match=f"out .*shares memory with {name}"):
            run(fa.attention_kvcache, call | {"out": shared})


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_new_rows_that_lie_in_a_cache(name: str, cache: str) -> None:
    """Either cache: appending to one would change what is still to be appended to the other."""
    call = Cache((5, 90), new=2, seqlen_q=2, options=CAUSAL).arrays()
    call[name] = call[cache][:, 4:6]
    before = call[cache].copy()
    with pytest.raises(ValueError, match=rf"{cache} \(shares memory with {name}\)"):
        run(fa.attention_kvcache, call)
    np.testing.assert_array_equal(call[cache], before)


@pytest.mark.parametrize(
    ("at", "number", "text"),
    [
        ((0, 0), 99, r"block_table\[0\]\[0\] \(99\) must be between 0 and 11"),
        ((1, 2), -1, r"block_table\[1\]\[2\] \(-1\)"),
        ((1, 2), None, r"block_table .* pages of its own"),
    ],
)
def test_pages_that_do_not_exist(at: tuple[int, int], number: int | None, text: str) -> None:
    case = Cache((5, 47), new=2, page_size=16)
    call = case.paged(case.arrays())
    call["block_table"][at] = call["block_table"][0, 0] if number is None else number
    before = call["k_cache"].copy()
    with pytest.raises(ValueError, match="attention_kvcache: " + text):
        run(fa.attention_kvcache, call)
    np.testing.assert_array_equal(call["k_cache"], before)
