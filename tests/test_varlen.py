"""Packed sequences: attention_varlen and its gradients, on every target.

A sequence is compared with the oracle by the rule of tests/tolerance.py, and with a call on it
alone bit for bit.
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
from tolerance import GRADIENT_FACTOR, assert_close
from yardstick import forward_yardstick, gradient_yardstick


@dataclass(frozen=True)
class Packed:
    """Lengths and options of a packed batch; arrays are drawn in `arrays`."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    value_dim: int = 16
    dtype: str = "float32"
    slack: int = 0  # rows behind the last sequence
    options: tuple[tuple[str, Any], ...] = ()
    alibi: str | None = None
    sinks: bool = False
    seed: int = 0

    @property
    def cu(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        q, k = (
            np.cumsum([0, *lengths]).astype(np.int32)
            for lengths in (self.lengths_q, self.lengths_k)
        )
        return q, k

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """query, key, value, dout, dlse; NaN in the slack."""
        rng = np.random.default_rng(self.seed)
        total_q, total_k = (int(cu[-1]) + self.slack for cu in self.cu)
        sizes = (
            (total_q, self.heads, self.head_dim),
            (total_k, self.kv_heads, self.head_dim),
            (total_k, self.kv_heads, self.value_dim),
            (total_q, self.heads, self.value_dim),
        )
        arrays = [rng.standard_normal(size).astype(DTYPES[self.dtype]) for size in sizes]
        dlse = rng.standard_normal((self.heads, total_q)).astype(np.float32)
        if self.slack:
            for x in arrays:
                x[-self.slack :] = np.nan
            dlse[:, -self.slack :] = np.nan
        return (*arrays, dlse)

    def opts(self) -> dict[str, Any]:
        rng = np.random.default_rng(self.seed + 1)
        opts = dict(self.options)
        if self.alibi is not None:
            batch = len(self.lengths_q)
            shape = (self.heads,) if self.alibi == "head" else (batch, self.heads)
            opts["alibi_slopes"] = rng.uniform(0.01, 0.5, shape).astype(np.float32)
        if self.sinks:
            opts["sinks"] = rng.standard_normal(self.heads).astype(np.float32)
        return opts

    def one(self, opts: dict[str, Any], b: int) -> dict[str, Any]:
        """The options of sequence b as a batch of one; only those that need no other sequence."""
        picked = dict(opts)
        if np.ndim(picked.get("alibi_slopes")) == 2:
            picked["alibi_slopes"] = picked["alibi_slopes"][b : b + 1]
        for name in ("q_offset", "kv_lengths"):
            if np.ndim(picked.get(name)) == 1:
                picked[name] = picked[name][b : b + 1]
        return picked

    def sequences(self) -> list[tuple[slice, slice]]:
        cu_q, cu_k = self.cu
        return [
            (slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])) for b in range(len(cu_q) - 1)
        ]


def _yardsticks(case: Packed, opts: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """The largest plain errors of any sequence: what the tolerance rule allows for."""
    query, key, value, dout, dlse = case.arrays()
    forward: dict[str, float] = {"out": 0.0, "lse": 0.0}
    backward: dict[str, float] = dict.fromkeys(
        ("dq", "dk", "dv", "dmask", "dalibi_slopes", "dsinks"), 0.0
    )
    longest = reference_packed.longest_sequences(*case.cu)
    for b, (rows, keys) in enumerate(case.sequences()):
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        own = reference_packed.sequence_options(opts, b, case.heads, longest)
        arrays = (query[None, rows], key[None, keys], value[None, keys])
        for name, error in forward_yardstick(arrays, own).items():
            forward[name] = max(forward[name], error)
        for name, error in gradient_yardstick(
            dout[None, rows], arrays, dlse[None, :, rows], own
        ).items():
            # A gradient that is summed over sequences may add up their errors.
            summed = name in ("dalibi_slopes", "dsinks")
            backward[name] = backward[name] + error if summed else max(backward[name], error)
    return forward, backward


def check(target: Target, case: Packed) -> None:
    """Forward and backward against the oracle; rows of no sequence exactly 0."""
    forward = target.function("attention_varlen")
    backward = target.function("attention_varlen_backward")
    if forward is None or backward is None:
        return
    opts = case.opts()
    query, key, value, dout, dlse = case.arrays()
    if target.refuses(lambda: forward(query, key, value, *case.cu, **opts), opts):
        return
    out, lse = forward(query, key, value, *case.cu, **opts)
    grads = backward(dout, query, key, value, out, lse, *case.cu, dlse=dlse, **opts)
    exact = reference_packed.attention_varlen(query, key, value, *case.cu, **opts)
    exact_grads = reference_packed.attention_varlen_backward(
        dout, query, key, value, *case.cu, dlse, **opts
    )
    allowed, allowed_grads = _yardsticks(case, opts)
    assert_close(out, exact[0], allowed["out"])
    assert_close(lse, exact[1], allowed["lse"], name="lse")
    for name in ("dq", "dk", "dv", "dalibi_slopes", "dsinks"):
        expected = getattr(exact_grads, name)
        assert (getattr(grads, name) is None) == (expected is None)
        if expected is not None:
            assert_close(
                getattr(grads, name),
                expected,
                allowed_grads[name],
                factor=GRADIENT_FACTOR,
                name=name,
            )
    if case.slack:
        assert (np.asarray(out, np.float32)[-case.slack :] == 0).all()
        assert np.isneginf(lse[:, -case.slack :]).all()
        for gradient in (grads.dq, grads.dk, grads.dv):
            assert (np.asarray(gradient, np.float32)[-case.slack :] == 0).all()


CASES = [
    Packed((5, 0, 17, 1), (9, 4, 0, 33), slack=3),
    Packed((70, 130, 3), (70, 130, 300), heads=4, kv_heads=2, options=(("causal", True),)),
    Packed((1, 1, 16, 17), (600, 3, 40, 900), heads=4, options=(("causal", True),)),
    Packed((40, 90), (100, 60), dtype="bfloat16", options=(("window", (7, 3)),), slack=2),
    Packed((40, 90), (100, 60), dtype="float16", options=(("causal", "top_left"),), head_dim=80),
    Packed((33, 20), (65, 129), options=(("softcap", 2.0),), alibi="batch", sinks=True),
    Packed(
        (33, 20, 4),
        (65, 129, 8),
        heads=2,
        options=(("dropout_p", 0.3), ("dropout_seed", 2**40 + 5), ("causal", True)),
    ),
    Packed((300, 12), (700, 2000), heads=6, kv_heads=2, head_dim=64, value_dim=32),
    Packed((1100, 3), (1100, 90), heads=1, head_dim=8, value_dim=8, options=(("causal", True),)),
]


@pytest.mark.parametrize("case", CASES)
def test_sequences_match_the_oracle(target: Target, case: Packed) -> None:
    check(target, case)


@st.composite
def packed_cases(draw: st.DrawFn) -> Packed:
    count = draw(st.integers(1, 5))
    length = st.one_of(st.integers(0, 4), st.integers(0, 20), st.integers(0, 140))
    kv_heads = draw(st.integers(1, 2))
    bound = st.one_of(st.just(-1), st.integers(0, 40))
    options: dict[str, Any] = {"causal": draw(st.sampled_from([False, True, "top_left"]))}
    lengths_k = tuple(draw(length) for _ in range(count))
    if draw(st.booleans()):
        options["window"] = (draw(bound), draw(bound))
    if draw(st.booleans()):
        options["kv_lengths"] = np.array([draw(st.integers(0, n)) for n in lengths_k], np.int64)
    offset = draw(st.sampled_from(["none", "none", "one", "per_batch"]))
    if offset == "one":
        options["q_offset"] = draw(st.integers(-20, 120))
    elif offset == "per_batch":
        options["q_offset"] = np.array([draw(st.integers(-20, 120)) for _ in range(count)])
    if draw(st.integers(0, 3)) == 0:
        options |= {"dropout_p": 0.4, "dropout_seed": draw(st.integers(0, 2**64 - 1))}
    if draw(st.integers(0, 3)) == 0:
        options["softcap"] = 3.0
    return Packed(
        tuple(draw(length) for _ in range(count)),
        lengths_k,
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 72)),
        value_dim=draw(st.integers(1, 72)),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        slack=draw(st.integers(0, 3)),
        options=tuple(options.items()),
        alibi=draw(st.sampled_from([None, None, None, "head", "batch"])),
        sinks=draw(st.integers(0, 3)) == 0,
        seed=draw(st.integers(0, 9)),
    )


@given(case=packed_cases())
def test_random_sequences(target: Target, case: Packed) -> None:
    check(target, case)


@given(case=packed_cases())
def test_each_sequence_has_the_bits_of_a_call_alone(target: Target, case: Packed) -> None:
    forward = target.function("attention_varlen")
    backward = target.function("attention_varlen_backward")
    opts = {n: x for n, x in case.opts().items() if not n.startswith("dropout")}
    if forward is None or backward is None or target.lacks(opts) or target.backend == "oracle":
        return
    query, key, value, dout, dlse = case.arrays()
    out, lse = forward(query, key, value, *case.cu, **opts)
    grads = backward(dout, query, key, value, out, lse, *case.cu, dlse=dlse, **opts)
    for b, (rows, keys) in enumerate(case.sequences()):
        own = case.one(opts, b)
        inputs = query[None, rows], key[None, keys], value[None, keys]
        alone, alone_lse = target.forward(*inputs, **own)
        alone_grads = target.backward(
            dout[None, rows], *inputs, alone, alone_lse, dlse=dlse[None, :, rows], **own
        )
        np.testing.assert_array_equal(out[rows], alone[0])
        np.testing.assert_array_equal(lse[:, rows], alone_lse[0])
        np.testing.assert_array_equal(grads.dq[rows], alone_grads.dq[0])
        np.testing.assert_array_equal(grads.dk[keys], alone_grads.dk[0])
        np.testing.assert_array_equal(grads.dv[keys], alone_grads.dv[0])


def test_strided_views_and_thread_counts(target: Target) -> None:
    """Packed qkv in one array, read in place; bits do not depend on the threads."""
    forward = target.function("attention_varlen")
    if forward is None or target.backend == "oracle":
        return
    import flashattn as fa

    rng = np.random.default_rng(3)
    qkv = rng.standard_normal((400, 3, 2, 24)).astype(np.float32)
    cu = np.array([0, 7, 150, 151, 400], np.int32)
    expected = forward(*(np.ascontiguousarray(qkv[:, i]) for i in range(3)), cu, cu, causal=True)
    threads = fa.get_num_threads()
    try:
        for count in (1, 2, 5):
            fa.set_num_threads(count)
            fa.copy_stats(reset=True)
            got = forward(qkv[:, 0], qkv[:, 1], qkv[:, 2], cu, cu, causal=True)
            assert all(stats.copied_bytes == 0 for stats in fa.copy_stats().values())
            for x, y in zip(got, expected, strict=True):
                np.testing.assert_array_equal(x, y)
    finally:
        fa.set_num_threads(threads)


def _fa() -> Any:
    return pytest.importorskip("flashattn")


def _arrays() -> tuple[Any, ...]:
    return Packed((4, 6), (5, 9)).arrays()[:3]


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "text"),
    [
        ([0, 4, 3], [0, 5, 14], r"cu_seqlens_q\[2\] \(3\) must be between 4 and 10"),
        ([1, 4, 10], [0, 5, 14], r"cu_seqlens_q\[0\] \(1\) must be between 0 and 0"),
        ([0, 4, 10], [0, 5, 15], r"cu_seqlens_k\[2\] \(15\) must be between 5 and 14"),
        ([0, 4, 10], [0, 14], r"cu_seqlens_k.length \(2\) must equal cu_seqlens_q.length \(3\)"),
        ([], [], r"cu_seqlens_q.shape .* must be \(batch \+ 1,\)"),
    ],
)
def test_lengths_that_do_not_fit(cu_q: list[int], cu_k: list[int], text: str) -> None:
    with pytest.raises(ValueError, match="attention_varlen: " + text):
        _fa().attention_varlen(*_arrays(), cu_q, cu_k)


def test_other_refusals() -> None:
    fa = _fa()
    query, key, value = _arrays()
    cu_q, cu_k = [0, 4, 10], [0, 5, 14]
    mask = np.zeros((1, 1, 6, 9), np.float32)
    with pytest.raises(NotImplementedError, match=r"mask .* packed sequences"):
        fa.attention_varlen(query, key, value, cu_q, cu_k, mask=mask)
    with pytest.raises(ValueError, match="layout"):
        fa.attention_varlen(query, key, value, cu_q, cu_k, layout="bhsd")
    with pytest.raises(ValueError, match=r"attention_varlen: query.ndim \(4\) must be 3"):
        fa.attention_varlen(query[None], key, value, cu_q, cu_k)
    with pytest.raises(TypeError, match=r"cu_seqlens_q\.dtype"):
        fa.attention_varlen(query, key, value, np.array([0.0, 4, 10]), cu_k)
    with pytest.raises(TypeError, match="cu_seqlens_k"):
        fa.attention_varlen(query, key, value, cu_q, None)
    with pytest.raises(ValueError, match="kv_lengths"):
        fa.attention_varlen(query, key, value, cu_q, cu_k, kv_lengths=[6, 9])


def test_no_sequences(target: Target) -> None:
    forward = target.function("attention_varlen")
    if forward is None:
        return
    query, key, value = _arrays()
    out, lse = forward(query, key, value, np.array([0]), np.array([0]))
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_torch_gradients() -> None:
    """Differentiable like `attention`, lse included; once."""
    torch = pytest.importorskip("torch")
    fa = _fa()
    case = Packed((5, 0, 30), (7, 3, 20), heads=4, kv_heads=2, slack=2)
    arrays = case.arrays()
    query, key, value, dout, dlse = (torch.from_numpy(x) for x in arrays)
    cu = [torch.from_numpy(x) for x in case.cu]
    for x in (query, key, value):
        x.requires_grad_()
    out, lse = fa.attention_varlen(query, key, value, *cu, causal=True)
    used = int(case.cu[0][-1])
    loss = (out * dout)[:used].sum() + (lse * dlse)[:, :used].nan_to_num(neginf=0).sum()
    loss.backward()
    dlse_used = np.where(np.isneginf(lse.detach().numpy()), 0, arrays[4])
    dlse_used[:, used:] = 0
    dout_used = arrays[3].copy()
    dout_used[used:] = 0
    exact = reference_packed.attention_varlen_backward(
        dout_used, *arrays[:3], *case.cu, dlse_used, causal=True
    )
    for got, expected in ((query, exact.dq), (key, exact.dk), (value, exact.dv)):
        np.testing.assert_allclose(got.grad, expected, atol=2e-5)
    first = torch.autograd.grad(
        fa.attention_varlen(query, key, value, *cu)[0][:used].square().sum(),
        query,
        create_graph=True,
    )[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first[:used].sum().backward()
