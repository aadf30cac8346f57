"""Masks over a KV cache: column j is row j of an entry, rows of its left padding counted, in pages
as in one piece.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from score_calls import CLOSE
from targets import Target
from test_kvcache import CAUSAL, Cache, copied, run


@pytest.mark.parametrize("leftpad", [None, (3, 20)])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_columns_are_rows_of_the_cache(
    target: Target, kind: str, leftpad: tuple[int, ...] | None
) -> None:
    function = target.function("attention_kvcache")
    if function is None or target.backend == "oracle":
        return  # whose masks cover the rows that exist
    lengths, starts = (20, 50), leftpad or (0, 0)
    case = Cache(lengths, rows=64, seqlen_q=3, leftpad=leftpad, options=CAUSAL, page_size=8)
    call = case.arrays()
    rng = np.random.default_rng(1)
    shape = (2, 4, 3, 64)
    mask = rng.random(shape) < 0.7 if kind == "bool" else rng.standard_normal(shape, np.float32)
    opts: dict[str, Any] = {"mask": mask}
    if target.refuses(lambda: run(function, copied(call) | opts), opts):
        return
    out, lse = run(function, copied(call) | opts)
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        rows = slice(start, length)
        alone = target.forward(
            call["query"][b : b + 1],
            *(call[name][b : b + 1, rows] for name in ("k_cache", "v_cache")),
            mask=mask[b : b + 1, ..., rows],
            causal=True,
        )
        np.testing.assert_allclose(out[b], alone[0][0], **CLOSE)
        np.testing.assert_allclose(lse[b], alone[1][0], **CLOSE)
    for got, expected in zip(run(function, case.paged(call) | opts), (out, lse), strict=True):
        np.testing.assert_array_equal(got, expected)
