"""The shaders with options, kernel by kernel: numbers against the oracle, the same bits under every
fragment map and schedule, dmask in parts, and dropout's words.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reference
from shader_cases import (
    Case,
    Tensors,
    compile_kernel,
    make_tensors,
    outputs,
    run_kernel,
    score_tiles,
    worst_error,
)
from shader_options import OFFSET, SEED, SHARD, Modifiers, ShaderOptions, full_shape, set_dropout
from simulator import SHADERS, Run, Simulator

BASE = Case(batch=2, head_dim=12, value_dim=9)
EVERYTHING = ShaderOptions(mask="float32", softcap=2.0, alibi="batch", sinks=True, dropout_p=0.25)
OPTIONS = {
    "bool": ShaderOptions(mask="bool"),
    "float32": ShaderOptions(mask="float32"),
    "float16": ShaderOptions(mask="float16"),
    "bfloat16": ShaderOptions(mask="bfloat16"),
    "shared by heads and entries": ShaderOptions(mask="float32", mask_axes="qk"),
    "shared by rows": ShaderOptions(mask="float32", mask_axes="bk"),
    "shared by keys": ShaderOptions(mask="float32", mask_axes="hq"),
    "one number": ShaderOptions(mask="float32", mask_axes=""),
    "softcap": ShaderOptions(softcap=1.5),
    "slopes of heads": ShaderOptions(alibi="head"),
    "slopes of entries": ShaderOptions(alibi="batch"),
    "sinks": ShaderOptions(sinks=True),
    "dropout": ShaderOptions(dropout_p=0.3),
    "everything dropped": ShaderOptions(dropout_p=1.0),
    "everything": EVERYTHING,
    "everything, bool": replace(EVERYTHING, mask="bool", mask_axes="bqk", alibi="head"),
}
# As in test_shaders.py: sums of at most about a hundred products of order one.
ROUNDING, TERMS = 32 * 2.0**-24, 100


def limit(case: Case, kernel: str, tensors: Tensors) -> float:
    """How far results may lie from the oracle's. One element of dmask is a sum over the axes that
    the mask is broadcast over, whose terms cancel: its error grows with their number.
    """
    arrays = [tensors.expected[name] for name in outputs(case, kernel)]
    size = max(float(np.abs(a[np.isfinite(a)]).max(initial=1.0)) for a in arrays)
    terms = np.prod(full_shape(case)) / arrays[0].size if kernel == "mask_gradient" else 1
    return ROUNDING * size * max(1.0, terms / TERMS)


def check(case: Case, kernel: str, simulator: Simulator) -> Run:
    tensors = make_tensors(case)
    run = run_kernel(compile_kernel(simulator, case, kernel), case, kernel, tensors)
    assert run.reports == [], kernel
    assert worst_error(case, kernel, tensors) <= limit(case, kernel, tensors), kernel
    return run


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("name", OPTIONS)
def test_numbers(name: str, causal: bool, simulator: Simulator) -> None:
    case = replace(BASE, options=OPTIONS[name], causal=causal)
    for kernel in case.kernels:
        check(case, kernel, simulator)


def test_wide_heads(simulator: Simulator) -> None:
    """The smaller blocks of head dimensions past 128."""
    case = replace(BASE, batch=1, head_dim=136, value_dim=40, options=EVERYTHING)
    for kernel in case.kernels:
        check(case, kernel, simulator)


def test_same_bits_under_every_map_and_schedule(simulator: Simulator) -> None:
    case = replace(BASE, options=EVERYTHING)
    pairs = [(f, "fifo") for f in ("row", "column", "apple", "random:1", "random:2", "random:3")]
    pairs += [("random:4", schedule) for schedule in ("fifo", "lifo", "random", "priority")]
    for kernel in case.kernels:
        library = compile_kernel(simulator, case, kernel)
        found = set()
        for chosen, schedule in pairs:
            simulator.set(map=chosen, schedule=schedule)
            tensors = make_tensors(case)
            assert run_kernel(library, case, kernel, tensors).reports == [], kernel
            found.add(b"".join(tensors.arrays[name].tobytes() for name in outputs(case, kernel)))
        assert len(found) == 1, kernel


@pytest.mark.parametrize("axes", ["k", "q", ""])
def test_dmask_in_parts(axes: str, simulator: Simulator) -> None:
    """A sum over many tiles of scores, in dispatches of two tiles each."""
    case = replace(BASE, options=ShaderOptions(mask="float32", mask_axes=axes), causal=False)
    library = compile_kernel(simulator, case, "mask_gradient")
    tensors = make_tensors(case)
    modifiers = Modifiers.from_buffer(tensors.arrays["modifiers"])
    tiles = score_tiles(case, tensors.arrays["mask"])
    assert tiles > 4
    for first in range(0, tiles, 2):
        modifiers.first_tile, modifiers.tile_count = first, min(2, tiles - first)
        assert run_kernel(library, case, "mask_gradient", tensors).reports == []
    assert worst_error(case, "mask_gradient", tensors) <= limit(case, "mask_gradient", tensors)


@pytest.mark.parametrize("kernel", ["forward", "backward_dq", "backward_dv", "backward_dk"])
def test_hidden_tiles_are_skipped(kernel: str, simulator: Simulator) -> None:
    """A mask with one tile that hides everything costs fewer products than one without."""
    case = replace(BASE, options=ShaderOptions(mask="bool"), causal=False)
    library = compile_kernel(simulator, case, kernel)
    counts = []
    for classes in ("given", "mixed"):
        tensors = make_tensors(case)
        assert (tensors.arrays["mask_tiles"] == 0).any()
        if classes == "mixed":
            tensors.arrays["mask_tiles"][...] = 1
        run = run_kernel(library, case, kernel, tensors)
        assert run.reports == []
        assert worst_error(case, kernel, tensors) <= limit(case, kernel, tensors)
        counts.append(run.counters["matrix_multiplies"])
    assert counts[0] < counts[1]


NON_FINITE = [
    ("value", "forward"),
    ("key", "backward_dq"),
    ("dout", "backward_dv"),
    ("query", "backward_dk"),
]


@pytest.mark.parametrize(("name", "kernel"), NON_FINITE)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("mask", ["bool", "float32"])
def test_nan_behind_a_mask_reaches_nothing(
    name: str, kernel: str, mask: str, softcap: float, simulator: Simulator
) -> None:
    """What a product multiplies with weight 0 is NaN where the mask hides it from some and not all:
    in tiles that are visited, and rows that see none of it keep their bits.
    """
    case = replace(BASE, options=ShaderOptions(mask=mask, softcap=softcap), causal=False)
    library = compile_kernel(simulator, case, kernel)
    clean, poisoned = make_tensors(case), make_tensors(case)
    poisoned.arrays[name][0, 5] = np.nan
    for tensors in (clean, poisoned):
        assert run_kernel(library, case, kernel, tensors).reports == []
    shown = np.broadcast_to(
        clean.arrays["mask"] if mask == "bool" else ~np.isneginf(clean.arrays["mask"]),
        (case.batch, case.query_heads, case.seqlen_q, case.seqlen_k),
    )
    if name in ("key", "value"):
        sees = shown[:, :, :, 5].transpose(0, 2, 1)  # (batch, row, head)
    else:
        group = shown[:, :, 5, :].reshape(case.batch, case.kv_heads, -1, case.seqlen_k)
        sees = group.any(2).transpose(0, 2, 1)  # (batch, key, head)
    (output, *_) = outputs(case, kernel)
    got, want = poisoned.arrays[output], clean.arrays[output]
    assert np.isnan(got[0][sees[0]]).all()
    np.testing.assert_array_equal(got[0][~sees[0]], want[0][~sees[0]])
    np.testing.assert_array_equal(got[1], want[1])


WORDS = """
#include "modifiers.h"
kernel void words(device float* one [[buffer(0)]], device float* four [[buffer(1)]],
                  constant ModifierParams& params [[buffer(2)]],
                  constant uint4& at [[buffer(3)]], uint lane [[thread_index_in_simdgroup]]) {
  const DropoutHead head = dropout_head(params, at.x, at.y);
  one[lane] = dropout_factor(head, at.z, at.w + lane);
  const float4 factors = dropout_factors(head, at.z, at.w + lane);
  for (uint c = 0; c < 4; ++c) four[lane * 4 + c] = factors[c];
}
"""


@pytest.mark.parametrize("place", [(0, 0, 0, 0), (1, 1, 3, 5), (1, 0, 94, 2**31 - 60)])
def test_dropout_is_numbered_as_everywhere(
    place: tuple[int, int, int, int], simulator: Simulator
) -> None:
    """One key at a time and four at a time, at places whose numbers pass 2^32."""
    b, h, i, j = place
    params = Modifiers()
    set_dropout(params, 0.5)
    one, four = np.zeros(32, np.float32), np.zeros((32, 4), np.float32)
    library = simulator.compile(WORDS, includes=[str(SHADERS)])
    buffers = [one, four, bytes(params), np.array(place, np.uint32)]
    assert library.kernel("words")((1, 1, 1), (32, 1, 1), buffers).reports == []
    shard = SHARD._replace(
        head_start=SHARD.head_start + b * SHARD.global_heads + h,
        query_start=SHARD.query_start + i,
        key_start=SHARD.key_start + j,
    )
    want = reference.dropout_mask((1, 1, 1, 35), 0.5, SEED, OFFSET, shard)[0, 0, 0]
    np.testing.assert_array_equal(one, want[:32])
    np.testing.assert_array_equal(four, np.lib.stride_tricks.sliding_window_view(want, 4))
    assert 0 < np.count_nonzero(want) < want.size
