"""model-parallel and full: gather whole shards bucket by bucket, and cut this rank's destination out of each bucket.

A gather moves contiguous rows, not boxes. A shard is therefore treated as its parameters in sequence, each a stack of
rows. A contribution is an interval of that sequence, rounded to rows, and gathered rows are cut afterwards.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from hybridengine.bench.reshard.methods.method import (
    Bucket,
    CopyingMethod,
    all_gather,
    box_view,
    empty_weights,
)
from hybridengine.errors import PlanError
from hybridengine.reshard.boxes import Box, cover, extents, intersect, moved, starts, view_index
from hybridengine.reshard.layout import LocalParameter, Shard
from hybridengine.weights.storage import WeightStorage


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows of one local parameter, as part of a member's contribution to a bucket."""

    bucket: int
    member: int
    """Index of the contributing rank in the gather's group."""
    parameter: LocalParameter
    start: int
    stop: int
    offset: int
    """Number of elements of the contribution before this block."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.parameter.shape[1:])

    @property
    def end(self) -> int:
        """Number of elements of the contribution up to the end of this block."""
        return self.offset + math.prod(self.shape)

    @property
    def boxes(self) -> Iterator[tuple[str, Box, Box]]:
        """Logical tensors with the boxes that the block holds, and the places of those in the block."""
        rows = ((self.start, self.stop), *((0, size) for size in self.parameter.shape[1:]))
        for piece in self.parameter.pieces:
            if (local := intersect(piece.local_box, rows)) is not None:
                yield piece.tensor, piece.in_tensor(local), moved(local, starts(rows), (0,) * len(rows))


def row_blocks(shard: Shard, member: int, part: int, num_parts: int, num_buckets: int) -> Iterator[RowBlock]:
    """Yield the blocks of one of `num_parts` nearly equal parts, which share no row, in nearly equal buckets."""
    total, num_pieces = shard.num_elements, num_parts * num_buckets
    for bucket in range(num_buckets):
        piece = part * num_buckets + bucket
        bounds = total * piece // num_pieces, total * (piece + 1) // num_pieces
        before, offset = 0, 0
        for parameter in shard.parameters:
            rows, row = parameter.shape[0], parameter.num_elements // parameter.shape[0]
            # A row belongs to the piece in which it starts.
            start, stop = (min(max(-(-(bound - before) // row), 0), rows) for bound in bounds)
            if start < stop:
                block = RowBlock(bucket, member, parameter, start, stop, offset)
                offset = block.end
                yield block
            before += parameter.num_elements


def cuts(
    destination: Shard, weights: WeightStorage, gathered: Iterable[tuple[RowBlock, Tensor]]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (bucket, source, view of `weights`) of the copies that fill a shard from blocks' views, each element once."""
    held: dict[str, list[tuple[tuple[int, Tensor, Box], Box]]] = defaultdict(list)
    for block, view in gathered:
        for tensor, box, place in block.boxes:
            held[tensor].append(((block.bucket, box_view(view, place), box), box))
    for parameter in destination.parameters:
        for need in parameter.pieces:
            found, missing = cover(need.box, held[need.tensor])
            if missing:
                raise PlanError(
                    f"{need.tensor}{list(missing[0])}, which {parameter.name} needs, is in no contribution; the group"
                    " that gathers must hold a whole model"
                )
            for (bucket, view, box), part in found:
                source = box_view(view, moved(part, starts(box), (0,) * len(box)))
                place = view_index(need.start_in_parameter(part), extents(part))
                yield bucket, source, weights[parameter.name][place]


class GatherAll(CopyingMethod):
    """Gather of shards, bucket by bucket.

    Every bucket takes the same fraction of every contribution, so that all ranks contribute equally to each, and all work
    per tensor is done once in advance. A bucket is cut before the next one is gathered, which takes less memory and no
    more time than gathering all weights (a peak of M) as in the paper.
    """

    @abstractmethod
    def group(self) -> dist.ProcessGroup:
        """Return the group whose ranks gather."""

    @abstractmethod
    def part(self, rank: int) -> tuple[int, int]:
        """Return the index of the part of its shard that a rank contributes, and the number of parts."""

    def make_buffers(self) -> WeightStorage:
        actor = self.actor
        self._group = self.group()
        ranks = dist.get_process_group_ranks(self._group)
        members = [(actor.layout.shard(rank), *self.part(rank)) for rank in ranks]
        largest = max(shard.num_elements / num_parts for shard, _, num_parts in members)
        num_buckets = max(1, -(-int(largest * len(members)) // self.bucket_elements))
        blocks = [
            block
            for member, (shard, part, num_parts) in enumerate(members)
            for block in row_blocks(shard, member, part, num_parts, num_buckets)
        ]
        widths = [0] * num_buckets
        for block in blocks:
            widths[block.bucket] = max(widths[block.bucket], block.end)
        made = empty_weights(actor, {"gathered": (max(widths) * len(ranks),)})
        self._buckets = [
            Bucket(made["gathered"][: width * len(ranks)].view(len(ranks), width)) for width in widths
        ]
        views = []
        for block in blocks:
            bucket = self._buckets[block.bucket]
            view = bucket.gathered[block.member, block.offset : block.end].view(block.shape)
            views.append((block, view))
            if ranks[block.member] == actor.rank:
                bucket.own.add(actor.weights[block.parameter.name][block.start : block.stop], view)
        for bucket, source, target in cuts(self.layout.shard(actor.rank), self.destination, views):
            self._buckets[bucket].loaded.add(source, target)
        return made

    def move(self) -> int:
        received = 0
        for bucket in self._buckets:
            bucket.own.run()
            received += all_gather(bucket.gathered, self._group)
            bucket.loaded.run()
        return received


class ModelParallel(GatherAll):
    """Every rank receives all shards of its replica and keeps the part that vanilla grouping assigns to it.

    The training copy stays in memory, because vanilla grouping assigns some ranks weights that they do not train.

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
