"""attention_kvcache: what it appends and where, and that it attends to exactly that.

Results follow the rule of tests/tolerance.py; pages against a contiguous cache, and the appended
rows themselves, are compared bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import reference_packed
from cases import DTYPES
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from targets import Target
from tolerance import assert_close
from yardstick import forward_yardstick

ARRAYS = ("query", "k_cache", "v_cache")


@dataclass(frozen=True)
class Cache:
    """Sizes of a cache and of what comes in; arrays are drawn in `arrays`."""

    lengths: tuple[int, ...]
    rows: int = 96
    new: int = 0
    seqlen_q: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    dtype: str = "float32"
    page_size: int | None = None
    leftpad: tuple[int, ...] | None = None
    rotary: str | None = None  # interleaved, halves
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    def arrays(self) -> dict[str, Any]:
        """query, k_cache, v_cache and the keywords; rows behind the lengths hold NaN."""
        rng = np.random.default_rng(self.seed)
        dtype, batch = DTYPES[self.dtype], len(self.lengths)

        def normal(*shape: int) -> NDArray[Any]:
            return rng.standard_normal(shape).astype(dtype)

        call: dict[str, Any] = {
            "query": normal(batch, self.seqlen_q, self.heads, self.head_dim),
            "k_cache": normal(batch, self.rows, self.kv_heads, self.head_dim),
            "v_cache": normal(batch, self.rows, self.kv_heads, self.value_dim),
            "cache_seqlens": np.array(self.lengths, np.int32),
        }
        for b, length in enumerate(self.lengths):
            for name in ("k_cache", "v_cache"):
                call[name][b, length:] = np.nan
                if self.leftpad is not None:
                    call[name][b, : self.leftpad[b]] = np.nan
        if self.new:
            call["k"] = normal(batch, self.new, self.kv_heads, self.head_dim)
            call["v"] = normal(batch, self.new, self.kv_heads, self.value_dim)
        if self.leftpad is not None:
            call["leftpad"] = np.array(self.leftpad, np.int32)
        if self.rotary is not None:
            angles = rng.uniform(0, 6, (self.rows + self.seqlen_q, self.head_dim // 2))
            call["rotary_cos"] = np.cos(angles).astype(dtype)
            call["rotary_sin"] = np.sin(angles).astype(dtype)
            call["rotary_interleaved"] = self.rotary == "interleaved"
        return call | dict(self.options)

    def paged(self, call: dict[str, Any]) -> dict[str, Any]:
        """The same call through pages in random order; unused numbers point nowhere."""
        size = self.page_size
        assert size is not None
        batch, per_entry = len(self.lengths), -(-self.rows // size)
        rng = np.random.default_rng(self.seed + 7)
        table = rng.permutation(batch * per_entry).reshape(batch, per_entry).astype(np.int32)
        call = dict(call)
        for name in ("k_cache", "v_cache"):
            cache = call[name]
            pages = np.full((batch * per_entry, size, *cache.shape[2:]), np.nan, cache.dtype)
            for b in range(batch):
                for row in range(self.rows):
                    pages[table[b, row // size], row % size] = cache[b, row]
            call[name] = pages
        for b, length in enumerate(self.lengths):
            table[b, -(-(length + self.new) // size) :] = -1
        return call | {"block_table": table}


def run(function: Any, call: dict[str, Any]) -> tuple[Any, Any]:
    call = dict(call)
    arrays = [call.pop(name) for name in ARRAYS]
    out, lse = function(*arrays, **call)
    return out, lse


def copied(call: dict[str, Any]) -> dict[str, Any]:
    return {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in call.items()}


def check(target: Target, case: Cache) -> None:
    function = target.function("attention_kvcache")
    if function is None:
        return
    call = case.arrays()
    if case.page_size is not None:
        call = case.paged(call)
    if target.refuses(lambda: run(function, copied(call)), dict(case.options)):
        return
    given = copied(call)
    out, lse = run(function, given)
    query, k_cache, v_cache = (call[n] for n in ARRAYS)
    rest = {n: x for n, x in call.items() if n not in ARRAYS}
    exact, keys, values = reference_packed.attention_kvcache(query, k_cache, v_cache, **rest)
    for name, rows in (("k_cache", keys), ("v_cache", values)):
        np.testing.assert_array_equal(given[name].astype(np.float64), rows)
    allowed = {"out": 0.0, "lse": 0.0}
    options = dict(case.options)
    for b, length in enumerate(case.lengths):
        first = 0 if case.leftpad is None else case.leftpad[b]
        rows = [_slot(call, case, b, row) for row in range(first, length + case.new)]
        if not rows:
            continue
        flat = [np.stack([given[n][at] for at in rows])[None] for n in ("k_cache", "v_cache")]
        for name, error in forward_yardstick((query[b : b + 1], flat[0], flat[1]), options).items():
            allowed[name] = max(allowed[name], error)
    assert_close(out, exact.out, allowed["out"])
    assert_close(lse, exact.lse, allowed["lse"], name="lse")


def _turned(case: Cache, call: dict[str, Any], b: int) -> NDArray[Any]:
    """The query of entry b as it is used."""
    query: NDArray[Any] = call["query"][b : b + 1]
    if case.rotary is None:
        return query
    first = case.lengths[b] - (0 if case.leftpad is None else case.leftpad[b])
    at = first + np.arange(case.seqlen_q) * ("causal" in dict(case.options))
    tables = (call[n] for n in ("rotary_cos", "rotary_sin", "rotary_interleaved"))
    return reference_packed.rotate(query[0], at, *tables)[None]


def _slot(call: dict[str, Any], case: Cache, b: int, row: int) -> tuple[int, int]:
    if case.page_size is None:
        return b, row
    return int(call["block_table"][b, row // case.page_size]), row % case.page_size


CAUSAL = (("causal", True),)
CASES = [
    Cache((0, 5, 96)),
    Cache((0, 5, 90), new=4, seqlen_q=4, options=CAUSAL),
    Cache((1, 17, 63), new=1, page_size=16),
    Cache((1, 17, 63), new=2, page_size=64, seqlen_q=2, dtype="bfloat16", options=CAUSAL),
    Cache((700, 130), rows=1024, new=1, page_size=128, heads=8, head_dim=64, value_dim=64),
    Cache((700, 130), rows=1024, new=1, page_size=16, heads=8, head_dim=64, dtype="float16"),
    Cache((20, 50), leftpad=(3, 50), new=3, seqlen_q=3, options=CAUSAL),
    Cache((20, 50), leftpad=(3, 40), new=3, seqlen_q=3, options=CAUSAL, page_size=8),
    Cache((20, 50), new=3, seqlen_q=3, options=CAUSAL, rotary="interleaved"),
    Cache((20, 50), new=3, seqlen_q=3, rotary="halves", leftpad=(2, 9), page_size=10),
    Cache((20, 50), new=3, seqlen_q=3, rotary="halves", dtype="bfloat16", options=CAUSAL),
    Cache((40, 3), new=40, seqlen_q=40, options=CAUSAL, page_size=7),
    Cache((80, 33), seqlen_q=20, page_size=5, options=(("window", (9, 0)),), head_dim=24),
    Cache((64, 10), seqlen_q=1, page_size=32, options=(("softcap", 2.0),)),
]


@pytest.mark.parametrize("case", CASES)
def test_caches_match_the_oracle(target: Target, case: Cache) -> None:
    check(target, case)


@st.composite
def caches(draw: st.DrawFn) -> Cache:
    batch, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows = draw(st.integers(1, 150))
    new = draw(st.integers(0, min(rows, 20)))
    lengths = tuple(draw(st.integers(0, rows - new)) for _ in range(batch))
    pads = tuple(draw(st.integers(0, n)) for n in lengths)
    bound = st.one_of(st.just(-1), st.integers(0, 30))
    options: dict[str, Any] = {"causal": draw(st.sampled_from([False, True, "top_left"]))}
    if draw(st.booleans()):
        options["window"] = (draw(bound), draw(bound))
    return Cache(
        lengths,
        rows=rows,
        new=new,
        seqlen_q=draw(st.one_of(st.just(1), st.integers(1, 20))),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 70)),
        value_dim=draw(st.integers(1, 70)),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        page_size=draw(st.one_of(st.none(), st.integers(1, 70))),
        leftpad=draw(st.sampled_from([None, pads])),
        options=tuple(options.items()),
        seed=draw(st.integers(0, 9)),
    )


@given(case=caches())
def test_random_caches(target: Target, case: Cache) -> None:
    check(target, case)


@given(case=caches(), page_size=st.integers(1, 70))
def test_pages_give_the_bits_of_a_contiguous_cache(
    target: Target, case: Cache, page_size: int
) -> None:
    function = target.function("attention_kvcache")
    if function is None:
        return
    case = Cache(**{**case.__dict__, "page_size": page_size})
    plain = case.arrays()
    paged = case.paged(plain)
    expected = run(function, copied(plain))
    for got, want in zip(run(function, copied(paged)), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_bits_of_a_call_with_lengths(target: Target) -> None:
    """What is attended to is the cache up to its length: `attention` with kv_lengths."""
    function = target.function("attention_kvcache")
    if function is None:
        return
    for seqlen_q in (1, 3, 40):
        call = Cache((7, 0, 60), seqlen_q=seqlen_q).arrays()
        got = run(function, copied(call) | {"causal": True})
        arrays = (call[n] for n in ARRAYS)
        expected = target.forward(*arrays, kv_lengths=call["cache_seqlens"], causal=True)
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_array_equal(x, y)


def test_cache_batch_idx_and_layouts(target: Target) -> None:
    function = target.function("attention_kvcache")
    if function is None or target.backend == "oracle":
        return
    call = Cache((9, 30), new=2, seqlen_q=2, options=CAUSAL).arrays()
    expected_call = copied(call)
    expected = run(function, expected_call)
    wide = copied(call)
    for name in ("k_cache", "v_cache"):
        cache = np.full((5, *call[name].shape[1:]), np.nan, np.float32)
        cache[3], cache[1] = call[name]
        wide[name] = cache
    got = run(function, wide | {"cache_batch_idx": [3, 1]})
    np.testing.assert_array_equal(wide["k_cache"][[3, 1]], expected_call["k_cache"])
    turned = {
        n: np.ascontiguousarray(x.transpose(0, 2, 1, 3))
        if n in ("query", "k_cache", "v_cache", "k", "v")
        else x
        for n, x in copied(call).items()
    }
    out, lse = run(function, turned | {"layout": "bhsd"})
    for a, b, c in ((got[0], expected[0], out.transpose(0, 2, 1, 3)), (got[1], expected[1], lse)):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(c, b)
    np.testing.assert_array_equal(turned["v_cache"].transpose(0, 2, 1, 3), expected_call["v_cache"])


def test_generation_row_by_row_is_the_whole_call(target: Target) -> None:
    """Appending token after token gives the rows of one causal call over all of them.

    To rounding: one row and many are different kernels' work.
    """
    function = target.function("attention_kvcache")
    if function is None or target.backend == "oracle":
        return
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, 12, h, 16)).astype(np.float32) for h in (4, 2, 2))
    whole, whole_lse = target.forward(query, key, value, causal=True)
    k_cache, v_cache = (np.full((2, 16, 2, 16), np.nan, np.float32) for _ in range(2))
    for t in range(12):
        step = slice(t, t + 1)
        out, lse = function(
            query[:, step],
            k_cache,
            v_cache,
            cache_seqlens=t,
            k=key[:, step],
            v=value[:, step],
            causal=True,
        )
        np.testing.assert_allclose(out[:, 0], whole[:, t], rtol=0, atol=2e-6)
        np.testing.assert_allclose(lse[:, :, 0], whole_lse[:, :, t], rtol=0, atol=2e-6)


def test_read_only_and_strided_caches() -> None:
    fa = pytest.importorskip("flashattn")
    call = Cache((5, 60), new=1).arrays()
    expected = run(fa.attention_kvcache, copied(call))
    frozen = copied(call)
    frozen["k_cache"].flags.writeable = False
    with pytest.raises(ValueError, match=r"k_cache .*writable"):
        run(fa.attention_kvcache, frozen)
    strided = copied(call)
    both = np.stack([strided["k_cache"], strided["v_cache"]], axis=-1)  # last stride is not 1
    strided |= {"k_cache": both[..., 0], "v_cache": both[..., 1]}
    fa.copy_stats(reset=True)
    for got, want in zip(run(fa.attention_kvcache, strided), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert fa.copy_stats()["cpu"].copied_bytes == 0


def test_torch_caches() -> None:
    torch = pytest.importorskip("torch")
    fa = pytest.importorskip("flashattn")
    call = Cache((5, 60), new=1, dtype="bfloat16").arrays()
    expected_call = copied(call)
    expected = run(fa.attention_kvcache, expected_call)

    def to_torch(x: Any) -> Any:
        if isinstance(x, np.ndarray) and x.dtype == DTYPES["bfloat16"]:
            return torch.from_numpy(x.astype(np.float32)).bfloat16()
        return torch.from_numpy(x) if isinstance(x, np.ndarray) else x

    tensors = {n: to_torch(x) for n, x in copied(call).items()}
    version = tensors["k_cache"]._version
    out, lse = run(fa.attention_kvcache, tensors)
    np.testing.assert_array_equal(out.float().numpy(), expected[0].astype(np.float32))
    np.testing.assert_array_equal(lse.numpy(), expected[1])
    np.testing.assert_array_equal(
        tensors["k_cache"].float().numpy(), expected_call["k_cache"].astype(np.float32)
    )
    assert tensors["k_cache"]._version > version
    tensors["query"].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient"):
        run(fa.attention_kvcache, tensors)
