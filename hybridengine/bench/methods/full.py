"""full: gather everything everywhere, then cut (DeepSpeed-Chat)."""

from __future__ import annotations

from hybridengine.bench.collectives import CollectiveTransport
from hybridengine.bench.methods.method import CopyingMethod, buffers
from hybridengine.bench.methods.shard_gather import Member, ShardGather
from hybridengine.runtime.storage import WeightStorage


class Full(CopyingMethod):
    """Every rank contributes 1/(p·t·d) of the weights to one gather over all ranks, as under ZeRO-3.

    Replicas of a shard contribute a different part of it each. As in model-parallel, a bucket is cut before the next
    one is gathered. The training copy is Megatron's shard, 1/(p·t) of the weights, not ZeRO's 1/(p·t·d): it stays, and
    counts as redundant.

    Source: HybridFlow, arXiv 2409.19256, section 5.4 and table 2 (DS-Chat).
    """

    def make_buffers(self) -> WeightStorage:
        actor, sizes = self.actor, self.actor.grid.sizes
        transport = CollectiveTransport(actor.registry.of((tuple(range(actor.grid.num_ranks)),)))
        members = [
            Member(actor.layout.shard(rank), actor.grid.coordinate(rank).dp_rank, sizes.dp_size)
            for rank in transport.ranks
        ]
        self._gather = ShardGather(
            members, self.layout.shard(actor.rank), transport, self.setting.bucket_elements
        )
        made = buffers(actor, gathered=self._gather.buffer_elements)
        self._gather.bind(actor.weights, self.destination, made["gathered"])
        return made

    def move(self) -> int:
        return self._gather.run()
