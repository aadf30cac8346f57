"""One rank of the distributed tests: computes every case in every mode and saves what the whole is.

Arguments: rank, number of ranks, a folder for the meeting point and for results.npz of rank 0.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from distributed_cases import CASES, MODES, Case, uneven_lengths
from flashattn import _shards
from flashattn.distributed import context_parallel_attention, shard, unshard
from targets import NOT_IMPLEMENTED, chosen_backend


def own_rows(case: Case, tensor: Any, sharding: Any, axis: int = 1) -> Any:
    """This rank's shard of axis 1 or, for lse, axis 2."""
    if not case.uneven:
        return shard(tensor, axis, sharding=sharding)
    shards = uneven_lengths(tensor.shape[axis], dist.get_world_size())
    held = _shards.pieces(shards, sharding)[dist.get_rank()]
    return torch.cat([tensor.narrow(axis, p.start, p.stop - p.start) for p in held], axis)


def compute(case: Case, method: Any, sharding: Any) -> dict[str, Any]:
    dtype = getattr(torch, case.dtype)
    arrays = {name: torch.from_numpy(x) for name, x in case.arrays().items()}
    small = {n: arrays.pop(n).requires_grad_() for n in ("alibi_slopes", "sinks") if n in arrays}
    dlse = own_rows(case, arrays.pop("dlse"), sharding, axis=2)
    mine = {n: own_rows(case, x.to(dtype), sharding) for n, x in arrays.items()}
    dout = mine.pop("dout")
    leaves = [x.detach().requires_grad_() for x in mine.values()]
    mode = {"method": method, "sharding": sharding, "return_lse": True}
    out, lse = context_parallel_attention(*leaves, **mode, **small, **dict(case.options))
    torch.autograd.backward([out, lse], [dout, dlse])
    local = [out, leaves[0].grad, leaves[1].grad, leaves[2].grad]
    found = dict(zip(("out", "dq", "dk", "dv"), local, strict=True))
    whole = {n: unshard(x, sharding=sharding).float() for n, x in found.items()}
    whole["lse"] = unshard(lse, 2, sharding=sharding)
    for name, parameter in small.items():
        dist.all_reduce(parameter.grad)
        whole[f"d{name}"] = parameter.grad
    return {n: x.detach().numpy() for n, x in whole.items()}


def groups(rank: int, ranks: int) -> np.ndarray[Any, Any]:
    """A group of the last two ranks alone, whose numbers are not the ranks'."""
    pair = dist.new_group([ranks - 2, ranks - 1])
    q = torch.ones(1, 8, 2, 16) * torch.arange(8)[None, :, None, None]
    if rank < ranks - 2:
        return np.zeros(0)
    mine = shard(q, group=pair)
    return unshard(
        context_parallel_attention(mine, mine, mine, group=pair, causal=True), group=pair
    ).numpy()


def drawn_seed() -> np.ndarray[Any, Any]:
    """Ranks whose generators differ drop the weights of one seed: rank 0's."""
    torch.manual_seed(5 + dist.get_rank())
    q = torch.ones(1, 12, 2, 16)
    mine = shard(q)
    return unshard(context_parallel_attention(mine, mine, mine, dropout_p=0.5)).numpy()


def kept_weights(method: Any, sharding: Any) -> Any:
    """What dropout leaves of equal weights."""
    q, k, v = torch.zeros(2, 20, 3, 8), torch.zeros(2, 24, 3, 8), torch.eye(24)
    v = v[None, :, None].expand(2, 24, 3, 24)
    mine = [shard(x, sharding=sharding) for x in (q, k, v)]
    mode = {"method": method, "sharding": sharding}
    out = context_parallel_attention(*mine, **mode, dropout_p=0.4, dropout_seed=9)
    return unshard(out, sharding=sharding).numpy()


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
    )
    results: dict[str, Any] = {"pair": groups(rank, ranks)}
    lacking = NOT_IMPLEMENTED[chosen_backend()]
    if "dropout_p" not in lacking:
        results["drawn_seed"] = drawn_seed()
        for method, sharding in MODES:
            results[f"kept/{method}/{sharding}"] = kept_weights(method, sharding)
    for case in CASES:
        if lacking & set(case.used):
            continue
        for method, sharding in MODES:
            for name, x in compute(case, method, sharding).items():
                results[f"{case.name}/{method}/{sharding}/{name}"] = x
    if rank == ranks - 1:
        np.savez(folder / "results.npz", **results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
