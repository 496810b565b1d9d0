"""Reads weights straight from the memory of ranks on the same host: for gloo what NCCL does inside a node by itself.

gloo has sockets only, between processes of one host too, where every byte is copied twice and by the kernel's network
code. Here the receiver copies it once: the sender tells it addresses, and keeps the memory until it is told that it has
been read. Both are said over local sockets.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.runtime.neighbours import Neighbours
from hybridengine.runtime.transport import (
    Message,
    Messages,
    PeerError,
    Pending,
    PointToPointTransport,
    meeting_rounds,
)

OFFER, DONE, MEET = "O", "D", "M"
"""What a note to a neighbour is about."""


def make_transport(group: dist.ProcessGroup) -> PointToPointTransport:
    """The transport for a group: peer memory where ranks on a CPU may read each other's, else messages. Collective."""
    if dist.get_backend(group) != "gloo" or dist.get_world_size(group) == 1:
        return PointToPointTransport(group)
    return PeerMemoryTransport(group)


class PeerMemoryTransport(PointToPointTransport):
    """Weights of ranks on this host are read from their memory, those of others come as messages.

    Addresses change with every switch, so that a transfer takes three parts: the sender offers addresses, the receiver
    reads and says that it is done, the sender waits for that before it touches the memory again. A sender that gives up
    changes its `epoch`, which readers look at last: they never take what it has overwritten since for weights. Making
    it is collective.

    Whatever two ranks post has the same number on both, counted from the first: with two buckets in flight they wait for
    it in another order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.neighbours = Neighbours(group, self.timeout_s)
        self.epoch = torch.zeros(1, dtype=torch.int64)
        self._num_posted: Counter[tuple[int, bool]] = Counter()
        self._num_told: Counter[int] = Counter()
        self._num_heard: Counter[int] = Counter()

    def prepare(
        self, sends: Sequence[Message], receives: Sequence[Message], are_weights: bool = True
    ) -> Messages:
        near = self.neighbours.ranks
        if not near or not all(tensor.is_cpu for _, tensor in (*sends, *receives)):
            return super().prepare(sends, receives, are_weights)
        messages = super().prepare(
            [message for message in sends if message[0] not in near],
            [message for message in receives if message[0] not in near],
            are_weights,
        )
        lent, borrowed = (
            {rank: [t for r, t in moved if r == rank] for rank in near} for moved in (sends, receives)
        )
        return _Shared(
            tuple(sends),
            tuple(receives),
            messages.operations,
            messages.peers,
            sum(tensor.nbytes for _, tensor in receives) if are_weights else 0,
            {rank: tensors for rank, tensors in lent.items() if tensors},
            {rank: tensors for rank, tensors in borrowed.items() if tensors},
        )

    def post(self, messages: Messages) -> Pending:
        posted = super().post(messages)
        if not isinstance(messages, _Shared):
            return posted
        numbers = {key: self._number(*key) for key in messages.exchanges}
        epoch = (self.epoch.data_ptr(), int(self.epoch.item()))
        for rank, tensors in messages.lent.items():
            addresses = (*epoch, *(tensor.data_ptr() for tensor in tensors))
            note = struct.pack(f"{len(addresses)}q", *addresses)
            self.neighbours.tell(rank, OFFER, numbers[rank, True], note)
        return _Reading(self, messages, posted, numbers)

    def meet(self, ranks: tuple[int, ...]) -> None:
        if not self.neighbours.are_all:
            super().meet(ranks)
            return
        for leading, following in meeting_rounds(ranks, dist.get_rank()):
            self._num_told[following] += 1
            self._num_heard[leading] += 1
            self.neighbours.tell(following, MEET, self._num_told[following])
            self.neighbours.hear(leading, MEET, self._num_heard[leading])

    def give_up(self) -> None:
        super().give_up()
        self.epoch += 1
        self.neighbours.close()

    def _number(self, rank: int, is_lent: bool) -> int:
        self._num_posted[rank, is_lent] += 1
        return self._num_posted[rank, is_lent]


class _Reading(Pending):
    """Messages under way, and memory that is lent and borrowed."""

    def __init__(
        self,
        transport: PeerMemoryTransport,
        messages: _Shared,
        posted: Pending,
        numbers: dict[tuple[int, bool], int],
    ) -> None:
        self._own, self._shared, self._posted, self._numbers = transport, messages, posted, numbers

    def wait(self) -> int:
        near = self._own.neighbours
        for rank, tensors in self._shared.borrowed.items():
            number = self._numbers[rank, False]
            self._read(rank, near.hear(rank, OFFER, number), tensors)
            near.tell(rank, DONE, number)
        arrived = self._posted.wait()
        for rank in self._shared.lent:
            near.hear(rank, DONE, self._numbers[rank, True])
        return arrived

    def abandon(self) -> None:
        self._posted.abandon()

    def _read(self, rank: int, offer: bytes, tensors: Sequence[Tensor]) -> None:
        near = self._own.neighbours
        epoch_address, epoch, *addresses = struct.unpack(f"{len(tensors) + 2}q", offer)
        for address, tensor in zip(addresses, tensors, strict=True):
            near.read(rank, address, tensor)
        found = torch.empty(1, dtype=torch.int64)
        near.read(rank, epoch_address, found)
        if int(found.item()) != epoch:
            raise PeerError((rank,), f"rank {rank} has given up what it had offered")


@dataclass(frozen=True)
class _Shared(Messages):
    """Messages of which some are read from memory."""

    lent: dict[int, list[Tensor]]
    """Reader -> tensors that it reads."""
    borrowed: dict[int, list[Tensor]]
    """Owner -> tensors that are filled from its memory."""

    @property
    def exchanges(self) -> list[tuple[int, bool]]:
        """(neighbour, whether it reads) of each."""
        return [*((rank, True) for rank in self.lent), *((rank, False) for rank in self.borrowed)]
