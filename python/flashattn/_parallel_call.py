"""One context-parallel call on one rank: who holds what, a pair's options, and the messages.

Relies on torch.distributed's point-to-point operations and all_gather alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from flashattn._options import DropoutShard
from flashattn._shards import Piece, Rules, pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashattn._shards import Sharding


@dataclass(frozen=True)
class ParallelCall:
    """What the ranks agree on before anything is computed.

    Attributes:
        group: the ranks, or None for the default group.
        rank: this one's number in the group.
        queries: per rank the pieces of the queries.
        keys: per rank the pieces of the keys.
        rules: the whole problem's positions.
        options: the other options of the call.
        heads: query heads.
    """

    group: dist.ProcessGroup | None
    rank: int
    queries: list[list[Piece]]
    keys: list[list[Piece]]
    rules: Rules
    options: dict[str, Any]
    heads: int

    @staticmethod
    def of(
        query: torch.Tensor,
        key: torch.Tensor,
        group: dist.ProcessGroup | None,
        sharding: Sharding,
        options: dict[str, Any],
    ) -> ParallelCall:
        """One small exchange: the lengths of all shards, and dropout's seed."""
        options = dict(options)
        seed = 0
        draws = options.get("dropout_p", 0) > 0 and "dropout_seed" not in options
        if draws:
            seed = int(torch.randint(0, 2**63 - 1, (), device="cpu"))
        mine = torch.tensor([query.shape[1], key.shape[1], seed], device=query.device)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, mine, group=group)
        table = torch.stack(found).tolist()
        if draws:
            options["dropout_seed"] = table[0][2]
        shards_q, shards_k = ([row[n] for row in table] for n in (0, 1))
        positions = ("causal", "window", "q_offset", "k_offset", "kv_lengths")
        rules = Rules.of(options, sum(shards_q), sum(shards_k))
        rest = {n: x for n, x in options.items() if n not in positions[2:]}
        return ParallelCall(
            group,
            dist.get_rank(group),
            pieces(shards_q, sharding),
            pieces(shards_k, sharding),
            rules,
            rest,
            query.shape[2] if query.ndim > 2 else 1,
        )

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return len(self.keys)

    def owner(self, step: int) -> int:
        """Whose keys this rank has at a step of the ring."""
        return (self.rank - step) % self.ranks

    def keys_of(self, rank: int) -> int:
        """Length of a rank's shard of the keys."""
        return sum(piece.stop - piece.start for piece in self.keys[rank])

    def pair_options(self, q: Piece, k: Piece) -> dict[str, Any]:
        """All options of attention of `q` over `k` but the arrays."""
        found = {**self.options, **self.rules.options(q, k)}
        if self.options.get("dropout_p"):
            sizes = (self.rules.seqlen_q, q.start, self.rules.seqlen_k, k.start)
            found["dropout_shard"] = DropoutShard(self.heads, 0, *sizes)
        return found

    def whole_keys(self) -> Piece:
        """All keys as one piece."""
        return Piece(0, self.rules.seqlen_k, 0)

    def _peer(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def exchange(self, messages: Sequence[Message]) -> Exchange:
        """Begins to send and to receive; nothing of the messages may be written before wait()."""
        operations, received = [], []
        for message in messages:
            if message.sent.numel() > 0:
                peer = self._peer(message.to)
                operations.append(
                    dist.P2POp(dist.isend, message.sent, peer, self.group, message.tag)
                )
            if message.place.numel() > 0:
                peer = self._peer(message.source)
                operations.append(
                    dist.P2POp(dist.irecv, message.place, peer, self.group, message.tag)
                )
            received.append(message.place)
        works = dist.batch_isend_irecv(operations) if operations else []
        return Exchange(list(messages), works, received)

    def pass_on(self, tensors: Sequence[torch.Tensor], rows: int, tag: int) -> Exchange:
        """To the next rank of the ring; what arrives from the one before has `rows` rows.

        Exchanges that are under way together have tags of their own, one per tensor from `tag` on.
        """
        if self.ranks == 1:
            return Exchange([], [], list(tensors))
        ahead, behind = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        return self.exchange(
            [
                Message(x, ahead, x.new_empty(x.shape[0], rows, *x.shape[2:]), behind, tag + n)
                for n, x in enumerate(tensors)
            ]
        )


@dataclass(frozen=True)
class Message:
    """A tensor to send and a place to receive one, both contiguous; empty ones do not travel.

    Messages between two ranks that are under way together differ in their tags.
    """

    sent: torch.Tensor
    to: int
    place: torch.Tensor
    source: int
    tag: int = 0


@dataclass(frozen=True)
class Exchange:
    """Messages under way; keeps what is being sent alive."""

    messages: list[Message]
    works: list[Any]
    received: list[Any]

    def wait(self) -> list[Any]:
        """The received tensors, in the order of the messages."""
        for work in self.works:
            work.wait()
        return self.received
