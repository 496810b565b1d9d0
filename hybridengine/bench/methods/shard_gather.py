"""Gathers whole shards among a group in buckets, and cuts this rank's destination out of each bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridengine.bench.collectives import CollectiveTransport
from hybridengine.bench.methods.method import box_view
from hybridengine.bench.row_blocks import Cutter, RowBlock, contribution, contribution_size
from hybridengine.reshard.layout import Shard
from hybridengine.runtime.storage import WeightStorage


@dataclass(frozen=True)
class Member:
    """What one rank of the group contributes: part `part` of `num_parts` of a shard."""

    shard: Shard
    part: int = 0
    num_parts: int = 1


@dataclass(frozen=True)
class _Bucket:
    """One gather, with its views; they stay valid while the buffer's memory comes and goes."""

    gathered: Tensor
    """[ranks of the group, elements of the largest contribution]."""
    own_from: list[Tensor]
    own_to: list[Tensor]
    cut_from: list[Tensor]
    cut_to: list[Tensor]


class ShardGather:
    """A gather of all members' contributions, bucket by bucket.

    Every bucket takes the same fraction of every contribution, so that all ranks contribute equally to each. The own
    contribution is packed where the gather wants it, and everything per tensor is done once, here.
    """

    def __init__(
        self,
        members: Sequence[Member],
        destination: Shard,
        transport: CollectiveTransport,
        bucket_elements: int,
    ) -> None:
        self._transport = transport
        largest = max(member.shard.num_elements / member.num_parts for member in members)
        num_buckets = max(1, -(-int(largest * len(members)) // bucket_elements))
        cutter = Cutter(destination)
        self._contributions = [
            [contribution(m.shard, m.part * num_buckets + index, m.num_parts * num_buckets) for m in members]
            for index in range(num_buckets)
        ]
        self._cuts = [cutter.cut(blocks) for blocks in self._contributions]
        cutter.check_complete()
        self._widths = [max(map(contribution_size, blocks)) for blocks in self._contributions]
        self._buckets: list[_Bucket] = []

    @property
    def buffer_elements(self) -> int:
        """Elements of the buffer that every bucket is gathered into."""
        return max(self._widths) * self._transport.size

    def bind(self, weights: WeightStorage, destination: WeightStorage, buffer: Tensor) -> None:
        """Make all views, once."""
        for blocks, cuts, width in zip(self._contributions, self._cuts, self._widths, strict=True):
            gathered = buffer[: width * self._transport.size].view(self._transport.size, width)
            own = blocks[self._transport.rank]
            self._buckets.append(
                _Bucket(
                    gathered,
                    [weights[block.parameter.name][block.start : block.stop] for block in own],
                    [_block(gathered, self._transport.rank, block) for block in own],
                    [box_view(_block(gathered, cut.member, cut.block), cut.source) for cut in cuts],
                    [box_view(destination[cut.parameter], cut.destination) for cut in cuts],
                )
            )

    def run(self) -> int:
        """Gather and cut; returns the bytes that came from other ranks."""
        before = self._transport.received_bytes
        for bucket in self._buckets:
            if bucket.own_to:
                torch._foreach_copy_(bucket.own_to, bucket.own_from)
            self._transport.all_gather(bucket.gathered)
            if bucket.cut_to:
                torch._foreach_copy_(bucket.cut_to, bucket.cut_from)
        return self._transport.received_bytes - before


def _block(gathered: Tensor, member: int, block: RowBlock) -> Tensor:
    return gathered[member, block.offset : block.offset + block.num_elements].view(block.shape)
