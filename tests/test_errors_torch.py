"""Refusals of torch's tensors, as test_errors.py has those of other arrays."""

from __future__ import annotations

from typing import Any

import flashattn as fa
import numpy as np
import pytest
import torch
from test_errors import OUT, K, Q, V


@pytest.mark.parametrize(
    ("inputs", "kind", "text"),
    [
        (
            (Q, torch.from_numpy(K), V),
            TypeError,
            r"attention: key \(torch.Tensor\) must be of the frame",
        ),
        (
            (torch.ones(2, 5, 4, 8, device="meta"),) * 3,
            ValueError,
            r"query\.device \(meta\) must be cpu",
        ),
        (
            (torch.ones(2, 5, 4, 8).double(),) * 3,
            TypeError,
            r"attention: query\.dtype \(float64\)",
        ),
    ],
    ids=["another framework's", "meta", "double"],
)
def test_arrays(inputs: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        fa.attention(*inputs)


def test_tensors_without_memory() -> None:
    from torch._subclasses import FakeTensorMode

    real = torch.ones(2, 5, 4, 8)
    with FakeTensorMode():
        fake = torch.ones(5, 5)
    with pytest.raises(TypeError, match="mask must have memory of its own"):
        fa.attention_forward(real, real, real, mask=fake)
    with FakeTensorMode():
        fake = torch.ones(2, 5, 4, 8)
        lse = torch.ones(2, 4, 5)
    # A merge of fake tensors is an operator, which gives fake tensors.
    assert [x.shape for x in fa.merge_attention([fake], [lse])] == [fake.shape, lse.shape]
    with pytest.raises(TypeError, match="mask must have memory of its own"):
        fa.attention_kvcache(real, real, real, cache_seqlens=3, mask=fake)
    sparse = torch.ones(2, 5, 4, 8).to_sparse()
    with pytest.raises(TypeError, match=r"attention: query\.layout"):
        fa.attention_forward(sparse, sparse, sparse)


def test_out_of_another_framework() -> None:
    with pytest.raises(TypeError, match=r"attention: out \(Tensor\) must be an array of"):
        fa.attention(Q, K, V, out=torch.from_numpy(np.copy(OUT)))
