"""model-parallel and full: gather whole shards bucket by bucket, and cut this rank's destination out of each bucket."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from hybridengine.bench.reshard.collectives import CollectiveTransport
from hybridengine.bench.reshard.methods.method import Copies, CopyingMethod, box_view, empty_weights
from hybridengine.bench.reshard.row_blocks import RowBlock, cuts, row_blocks
from hybridengine.weights.storage import WeightStorage


@dataclass(frozen=True)
class _Bucket:
    """One gather with its views, which stay valid when the buffer's memory is released and reallocated."""

    gathered: Tensor
    """Gathered rows, [ranks of the group, elements of the largest contribution]."""
    own: Copies = field(default_factory=Copies)
    """Copies of this rank's contribution into the buffer."""
    cuts: Copies = field(default_factory=Copies)
    """Copies of the parts that this rank's engine needs."""

    def view(self, block: RowBlock) -> Tensor:
        """Return the view of the buffer that receives a block."""
        return self.gathered[block.member, block.offset : block.end].view(block.shape)


class GatherAll(CopyingMethod):
    """Gather of shards, bucket by bucket.

    Every bucket takes the same fraction of every contribution, so that all ranks contribute equally to each. This rank's
    contribution is packed in place, and all work per tensor is done once in advance. A bucket is cut before the next one
    is gathered, which takes less memory and no more time than gathering all weights (a peak of M) as in the paper.
    """

    @abstractmethod
    def group(self) -> dist.ProcessGroup:
        """Return the group whose ranks gather."""

    @abstractmethod
    def part(self, rank: int) -> tuple[int, int]:
        """Return the index of the part of its shard that a rank contributes, and the number of parts."""

    def make_buffers(self) -> WeightStorage:
        actor = self.actor
        self._transport = transport = CollectiveTransport(self.group())
        members = [(actor.layout.shard(rank), *self.part(rank)) for rank in transport.ranks]
        largest = max(shard.num_elements / num_parts for shard, _, num_parts in members)
        num_buckets = max(1, -(-int(largest * len(members)) // self.setting.bucket_elements))
        blocks = [
            block
            for member, (shard, part, num_parts) in enumerate(members)
            for block in row_blocks(shard, member, part, num_parts, num_buckets)
        ]
        widths = [0] * num_buckets
        for block in blocks:
            widths[block.bucket] = max(widths[block.bucket], block.end)
        made = empty_weights(actor, {"gathered": (max(widths) * transport.size,)})
        self._buckets = [
            _Bucket(made["gathered"][: width * transport.size].view(transport.size, width))
            for width in widths
        ]
        for block in blocks:
            if block.member == transport.rank:
                rows = actor.weights[block.parameter.name][block.start : block.stop]
                self._buckets[block.bucket].own.add(rows, self._buckets[block.bucket].view(block))
        for cut in cuts(self.layout.shard(actor.rank), blocks):
            bucket = self._buckets[cut.block.bucket]
            wanted = box_view(bucket.view(cut.block), cut.source)
            bucket.cuts.add(wanted, box_view(self.destination[cut.parameter], cut.destination))
        return made

    def move(self) -> int:
        before = self._transport.received_bytes
        for bucket in self._buckets:
            bucket.own.run()
            self._transport.all_gather(bucket.gathered)
            bucket.cuts.run()
        return self._transport.received_bytes - before


class ModelParallel(GatherAll):
    """Every rank receives all shards of its replica and keeps the part that vanilla grouping assigns to it.

    The training copy stays in memory, because vanilla grouping assigns some ranks weights that do not overlap with those
    that they train.

    Source: HybridFlow, arXiv 2409.19256, section 5.4 and table 2 (HybridFlow-V).
    """

    def group(self) -> dist.ProcessGroup:
        return self.actor.registry.of(self.actor.grid.groups("pp", "tp"))

    def part(self, rank: int) -> tuple[int, int]:
        return 0, 1


class Full(GatherAll):
    """Every rank contributes 1/(p·t·d) of the weights to one gather over all ranks, as under ZeRO-3.

    Each replica of a shard contributes a different part of it. The training copy is Megatron's shard, 1/(p·t) of the
    weights, not ZeRO's 1/(p·t·d); it stays in memory and counts as redundant.

    Source: HybridFlow, arXiv 2409.19256, section 5.4 and table 2 (DS-Chat).
    """

    def group(self) -> dist.ProcessGroup:
        return self.actor.registry.of((tuple(range(self.actor.grid.num_ranks)),))

    def part(self, rank: int) -> tuple[int, int]:
        return self.actor.grid.coordinate(rank).dp_rank, self.actor.grid.sizes.dp_size
