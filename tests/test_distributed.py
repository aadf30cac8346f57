"""flashattn.distributed on 2 and 4 processes (gloo over the loopback device) against the oracle, by
the rule; and the counts of its work and bytes for 1 to 64 ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import flashattn as fa
import ml_dtypes
import numpy as np
import pytest
import reference
import torch
from distributed_cases import CASES, MODES, Case
from flashattn import _ring, _shards
from flashattn._parallel_call import Exchange, ParallelCall
from flashattn.distributed import context_parallel_attention
from targets import chosen_is_simulated
from tolerance import GRADIENT_FACTOR, assert_close
from torch_numbers import missing, tensors
from yardstick import forward_yardstick, gradient_yardstick

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
    pytest.mark.skipif(chosen_is_simulated(), reason="every rank would simulate a device"),
]
FOLDER = Path(__file__).resolve().parent
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Everything that a group of processes computed."""
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment |= {"FLASHATTN_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / "distributed_worker.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(request.param), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(request.param)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, text in zip(ranks, errors, strict=True):
        assert process.returncode == 0, text
    with np.load(folder / "results.npz") as file:
        return dict(file)


@lru_cache
def truth(case: Case) -> tuple[Any, Any, dict[str, float]]:
    """The oracle's results and gradients, and the plain errors."""
    arrays = case.arrays()
    dtype = DTYPES[case.dtype]
    inputs = tuple(arrays[n].astype(dtype) for n in ("query", "key", "value"))
    dout, dlse = arrays["dout"].astype(dtype), arrays["dlse"]
    options = dict(case.options) | {n: arrays[n] for n in ("alibi_slopes", "sinks") if n in arrays}
    exact = reference.attention(*inputs, **options)
    gradients = reference.attention_backward(dout, *inputs, dlse, **options)
    allowed = forward_yardstick(inputs, options)
    return exact, gradients, allowed | gradient_yardstick(dout, inputs, dlse, options)


@pytest.mark.parametrize(("method", "sharding"), MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_the_oracle(results: Any, case: Case, method: str, sharding: str) -> None:
    if missing(*case.used):
        return
    exact, gradients, allowed = truth(case)
    dtype = DTYPES[case.dtype]
    found = {n: results[f"{case.name}/{method}/{sharding}/{n}"] for n in ("out", "dq", "dk", "dv")}
    assert_close(found["out"].astype(dtype), exact.out, allowed["out"])
    lse = results[f"{case.name}/{method}/{sharding}/lse"]
    assert_close(lse, exact.lse, allowed["lse"], name="lse")
    for name in ("dalibi_slopes", "dsinks"):
        if getattr(gradients, name) is not None:
            found[name] = results[f"{case.name}/{method}/{sharding}/{name}"]
    for name, got in found.items():
        if name != "out":
            got = got if name in ("dalibi_slopes", "dsinks") else got.astype(dtype)
            limit = allowed[name]
            assert_close(got, getattr(gradients, name), limit, factor=GRADIENT_FACTOR, name=name)


@pytest.mark.parametrize(("method", "sharding"), MODES)
def test_dropout_has_one_processs_bits(results: Any, method: str, sharding: str) -> None:
    """Values that are the identity show which weights were kept."""
    if missing("dropout_p"):
        return
    weights = results[f"kept/{method}/{sharding}"].transpose(0, 2, 1, 3)
    kept = fa.dropout_mask((2, 3, 20, 24), 0.4, 9) > 0
    assert np.array_equal(weights > 0, kept)


def test_groups_within_the_world(results: Any) -> None:
    q = np.ones((1, 8, 2, 16), np.float32) * np.arange(8, dtype=np.float32)[None, :, None, None]
    expected = fa.attention(q, q, q, causal=True)
    np.testing.assert_allclose(results["pair"], expected, rtol=0, atol=1e-5)


def test_one_seed_for_all_ranks(results: Any) -> None:
    if missing("dropout_p"):
        return
    torch.manual_seed(5)
    seed = int(torch.randint(0, 2**63 - 1, ()))
    q = np.ones((1, 12, 2, 16), np.float32)
    expected = fa.attention(q, q, q, dropout_p=0.5, dropout_seed=seed)
    np.testing.assert_allclose(results["drawn_seed"], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("method", "sharding"), MODES)
def test_one_rank_and_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any, sharding: Any
) -> None:
    """A group of one sends nothing; in layout bhsd too."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    meeting = f"file://{tmp_path}/meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    mode = {"method": method, "sharding": sharding}
    try:
        q, k, v = tensors((2, 4, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16), grad=True)
        out = context_parallel_attention(q, k, v, causal=True, layout="bhsd", **mode)
        expected = fa.attention(q, k, v, causal=True, layout="bhsd")
        assert torch.allclose(out, expected, rtol=0, atol=2e-6)
        found, wanted = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
        for one, other in zip(found, wanted, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-5)
        for options, kind, text in (
            ({"mask": torch.ones(9, 9, dtype=torch.bool)}, ValueError, "mask"),
            ({"windows": (1, 1)}, TypeError, "windows"),
            ({"method": "tree"}, ValueError, "method"),
            ({"sharding": "striped"}, ValueError, "sharding"),
        ):
            with pytest.raises(kind, match=text):
                context_parallel_attention(q, k, v, **{**mode, **options})
        (grad,) = torch.autograd.grad(
            context_parallel_attention(q, k, v, **mode).square().sum(), q, create_graph=True
        )
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
@pytest.mark.parametrize("shards", [[8, 8, 8, 8], [7, 6, 6, 6], [0, 5, 1, 9], [5], [0, 0]])
def test_pieces_cover_the_sequence(shards: list[int], sharding: Any) -> None:
    held = _shards.pieces(shards, sharding)
    for length, mine in zip(shards, held, strict=True):
        assert [piece.local for piece in mine] == list(
            np.cumsum([0, *(p.stop - p.start for p in mine)])[:-1]
        )
        assert sum(piece.stop - piece.start for piece in mine) == length
    rows = sorted((p.start, p.stop) for mine in held for p in mine if p.start < p.stop)
    assert [row for start, stop in rows for row in range(start, stop)] == list(range(sum(shards)))


@pytest.mark.parametrize("seqlen", [1, 7, 64, 1000])
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_even_shards(seqlen: int, sharding: Any) -> None:
    for ranks in (1, 2, 5, 64):
        shards = _shards.lengths(seqlen, ranks, sharding)
        assert sum(shards) == seqlen
        assert max(shards) - min(shards) <= (1 if sharding == "contiguous" else 2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "top_left", "window": (5, -1)},
        {"window": (6, 2)},
        {"causal": True, "kv_lengths": [40, 11]},
        {"causal": True, "q_offset": 7, "k_offset": 2},
        {"window": (0, 3), "q_offset": [3, 9]},
    ],
    ids=str,
)
def test_skipped_pairs_see_nothing(options: dict[str, Any]) -> None:
    """A pair of pieces is left out exactly where the oracle's visibility has no True."""
    rules = _shards.Rules.of(options, 33, 40)
    whole = reference.visibility(2, 33, 40, reference.Options(**options))
    for q in _shards.pieces([9, 0, 12, 12], "zigzag"):
        for k in _shards.pieces([10, 10, 13, 7], "zigzag"):
            for _, one, other in _shards.pairs(q, k):
                part = whole[:, :, one.start : one.stop, other.start : other.stop]
                if part.any():
                    assert rules.sees(one, other)
                elif "q_offset" not in options and "kv_lengths" not in options:
                    # With one position per entry the bound is the batch's and not each entry's.
                    assert not rules.sees(one, other)


def work(seqlen: int, ranks: int, sharding: Any) -> list[int]:
    """Visible scores of each rank under a causal mask."""
    held = _shards.pieces(_shards.lengths(seqlen, ranks, sharding), sharding)
    rules = _shards.Rules.of({"causal": True}, seqlen, seqlen)
    every = [piece for mine in held for piece in mine]
    return [sum(rules.visible(q, k) for _, q, k in _shards.pairs(mine, every)) for mine in held]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32, 64])
def test_zigzag_shares_causal_work_evenly(ranks: int) -> None:
    """docs/distributed.md has these counts."""
    seqlen = 8192
    total = seqlen * (seqlen + 1) // 2
    zigzag, contiguous = (work(seqlen, ranks, s) for s in ("zigzag", "contiguous"))
    assert sum(zigzag) == sum(contiguous) == total
    assert max(zigzag) == min(zigzag) == total // ranks
    # The last contiguous rank has (2 - 1 / ranks) times its share.
    expected = total / ranks * (2 - 1 / ranks)
    assert abs(max(contiguous) - expected) <= seqlen


class Counted(ParallelCall):
    """One rank of many, alone: what it would send is counted, and zeros arrive."""

    def exchange(self, messages: Any) -> Exchange:
        for message in messages:
            self.options["sent"].append(message.sent.nbytes)
            message.place.zero_()
        return Exchange(list(messages), [], [message.place for message in messages])

    def pair_options(self, q: Any, k: Any) -> dict[str, Any]:
        return {n: x for n, x in super().pair_options(q, k).items() if n != "sent"}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_bytes_that_a_ring_sends(ranks: int, sharding: Any) -> None:
    """docs/distributed.md has these formulas: bounded by one copy of keys and values per pass."""
    seqlen, rank = 256, ranks // 2
    shards = _shards.pieces(_shards.lengths(seqlen, ranks, sharding), sharding)
    rules = _shards.Rules.of({"causal": True}, seqlen, seqlen)
    sent: list[int] = []
    call = Counted(None, rank, shards, shards, rules, {"causal": True, "sent": sent}, 2)
    rows = seqlen // ranks
    sizes = ((1, rows, 2, 8), (1, rows, 1, 8), (1, rows, 1, 4))
    inputs = [torch.ones(size, dtype=torch.bfloat16) for size in sizes]
    out, lse = _ring.forward(call, *inputs, None, None)
    whole = seqlen * 1 * (8 + 4)  # numbers in all keys and values
    assert sum(sent) == 2 * whole * (ranks - 1) // ranks
    sent.clear()
    _ring.backward(call, (out, torch.zeros_like(lse), out, lse), *inputs, None, None)
    gradients = 4 * whole if ranks > 1 else 0
    assert sum(sent) == 2 * whole * (ranks - 1) // ranks + gradients
