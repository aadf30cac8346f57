"""What the tests of torch's tracing and transforms share: inputs, options, comparisons."""

from __future__ import annotations

from typing import Any

import flashattn as fa
import torch
from torch_numbers import tensors

QKV = ((2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 8))
PLAIN = {"causal": True, "window": (3, 0), "scale": 0.2}
PACKED = ((9, 4, 16), (9, 2, 16), (9, 2, 8))


def attend(q: Any, k: Any, v: Any) -> Any:
    return fa.attention(q, k, v, causal=True, window=(3, 0), scale=0.2)


def gradients(out: Any, *inputs: Any) -> tuple[Any, ...]:
    return torch.autograd.grad(out.square().sum(), inputs)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def option_sets() -> dict[str, dict[str, Any]]:
    """Every option once, by the name that a backend may lack."""
    slopes, sinks = tensors((4,), (4,), seed=4, grad=True)
    (mask,) = tensors((2, 1, 9, 9), seed=5, grad=True)
    lengths = torch.tensor([9, 5], dtype=torch.int32)
    return {
        "none": {},
        "window": PLAIN,
        "kv_lengths": {"kv_lengths": lengths, "causal": "top_left", "k_offset": 2, "q_offset": 1},
        "q_offset": {"q_offset": torch.tensor([0, 3]), "causal": True, "layout": "bshd"},
        "mask": {"mask": mask},
        "softcap": {"softcap": 2.0},
        "alibi_slopes": {"alibi_slopes": slopes},
        "sinks": {"sinks": sinks},
        "dropout_p": {
            "dropout_p": 0.3,
            "dropout_seed": 2**64 - 3,
            "dropout_offset": 2**63,
            "dropout_shard": fa.DropoutShard(8, 4, 20, 3, 30, 5),
        },
    }
