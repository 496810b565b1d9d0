"""model-parallel: all-gather over the model-parallel group, then cut (HybridFlow-V of the paper)."""

from __future__ import annotations

from hybridengine.bench.collectives import CollectiveTransport
from hybridengine.bench.methods.method import CopyingMethod, buffers
from hybridengine.bench.methods.shard_gather import Member, ShardGather
from hybridengine.runtime.storage import WeightStorage


class ModelParallel(CopyingMethod):
    """Every rank gets all shards of its replica and keeps the part that vanilla grouping gives it.

    The paper gathers all weights before it cuts, a peak of M; here a bucket is cut before the next one is gathered,
    which takes less memory and no more time. The training copy stays, because vanilla grouping gives some ranks weights
    that have nothing in common with those they train.

    Source: HybridFlow, arXiv 2409.19256, section 5.4 and table 2.
    """

    def make_buffers(self) -> WeightStorage:
        actor = self.actor
        transport = CollectiveTransport(actor.registry.of(actor.grid.groups("pp", "tp")))
        self._gather = ShardGather(
            [Member(actor.layout.shard(rank)) for rank in transport.ranks],
            self.layout.shard(actor.rank),
            transport,
            self.setting.bucket_elements,
        )
        made = buffers(actor, gathered=self._gather.buffer_elements)
        self._gather.bind(actor.weights, self.destination, made["gathered"])
        return made

    def move(self) -> int:
        return self._gather.run()
