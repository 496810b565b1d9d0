"""Carries a plan out on one rank, bucket by bucket, between two sets of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridengine.errors import PlanError
from hybridengine.reshard.layout import LocalParameter
from hybridengine.reshard.plan import Bucket, Move, Pack, Place, Plan
from hybridengine.runtime.ledger import StorageLedger
from hybridengine.runtime.storage import WeightStorage, trim_heap
from hybridengine.runtime.transport import PointToPointTransport


@dataclass(frozen=True)
class _Program:
    """A bucket as one rank sees it; views stay valid while storages come and go."""

    incoming: list[list[Tensor]]
    """Destination views of each message, in the message's order."""
    local_from: list[Tensor]
    local_to: list[Tensor]


class PlanExecutor:
    """One rank's part in a plan.

    Args:
        source, destination: this rank's weights in both layouts. A rank without a part in one has it empty.
        release_source: give up each bucket's source weights once the bucket has arrived (a switch); keep them
            otherwise (an export).

    Raises:
        PlanError: a parameter is missing, or has another shape or dtype than the layouts say.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        source: WeightStorage,
        destination: WeightStorage,
        transport: PointToPointTransport,
        ledger: StorageLedger,
        release_source: bool = True,
    ) -> None:
        self.plan, self._rank = plan, rank
        self._source, self._destination = source, destination
        self._transport, self._ledger = transport, ledger
        self._release_source = release_source
        self._programs: dict[int, _Program] = {}
        self._padded: set[str] = set()
        dtypes = set()
        for layout, storage in ((plan.source, source), (plan.destination, destination)):
            parameters = layout.shard(rank).parameters if rank in layout.keys else ()
            _check_storage(layout.kind, rank, parameters, storage)
            dtypes |= {storage[parameter.name].dtype for parameter in parameters}
        if len(dtypes) > 1:
            raise PlanError(
                f"{plan.source.kind} and {plan.destination.kind} hold weights of types"
                f" {', '.join(sorted(map(str, dtypes)))}; a switch needs one type on both sides"
            )
        if rank in plan.destination.keys:
            self._padded = {p.name for p in plan.destination.shard(rank).parameters if p.has_padding}

    def run(
        self,
        buckets: Sequence[int] | None = None,
        after_bucket: Callable[[tuple[str, ...]], None] | None = None,
    ) -> None:
        """Carry out the plan's buckets (all, where None) in order.

        Args:
            after_bucket: called with the destination parameters of each bucket once they are filled.

        Raises:
            TransferError: names the bucket; buckets before it are complete, the ones after it untouched.
        """
        for index in range(len(self.plan.buckets)) if buckets is None else buckets:
            self.run_bucket(index)
            if after_bucket is not None:
                after_bucket(self.plan.buckets[index].destinations.get(self._rank, ()))

    def run_bucket(self, index: int) -> None:
        """Carry out one bucket: pack, exchange, make room, fill, release."""
        bucket = self.plan.buckets[index]
        like = self._like(bucket)
        if like is None:
            return
        outgoing, incoming = bucket.sends(self._rank), bucket.receives(self._rank)
        filled = bucket.destinations.get(self._rank, ())
        sent = [_flat(pack.num_elements, like) for pack in outgoing]
        arrived = [_flat(pack.num_elements, like) for pack in incoming]
        self._ledger.stage(sent + arrived)
        try:
            for pack, buffer in zip(outgoing, sent, strict=True):
                views = [_view(self._source, move.source, move) for move in pack.moves[0]]
                torch._foreach_copy_(_split(buffer, views), views)
            self._exchange(index, outgoing, sent, incoming, arrived)
            self._ledger.unstage(sent)
            sent.clear()
            self._destination.materialise(filled, zero=self._padded.intersection(filled))
            self._ledger.note()
            self._fill(self._program(index, incoming), arrived)
        finally:
            self._ledger.unstage(sent + arrived)
        if self._release_source:
            self._source.release(bucket.sources.get(self._rank, ()))
            if like.device.type == "cpu":
                trim_heap()  # a GPU's caching allocator uses freed blocks again by itself

    def _exchange(
        self,
        index: int,
        outgoing: list[Pack],
        sent: list[Tensor],
        incoming: list[Pack],
        arrived: list[Tensor],
    ) -> None:
        before = self._transport.received_bytes
        self._transport.exchange(
            [(peer, buffer) for pack, buffer in zip(outgoing, sent, strict=True) for peer in pack.receivers],
            [(pack.source_rank, buffer) for pack, buffer in zip(incoming, arrived, strict=True)],
            what=f"bucket {index} of {len(self.plan.buckets)} ({self.plan.buckets[index].tensors[0]} ...) of"
            f" {self.plan.source.kind} -> {self.plan.destination.kind}",
        )
        self._ledger.receive(self._transport.received_bytes - before)

    def _program(self, index: int, incoming: list[Pack]) -> _Program:
        """Destination views of a bucket, made at its first run, when its storages exist."""
        if index not in self._programs:
            local = self.plan.buckets[index].local(self._rank)
            self._programs[index] = _Program(
                incoming=[
                    [_view(self._destination, move.destination, move) for move in pack.moves_to(self._rank)]
                    for pack in incoming
                ],
                local_from=[_view(self._source, move.source, move) for move in local],
                local_to=[_view(self._destination, move.destination, move) for move in local],
            )
        return self._programs[index]

    @staticmethod
    def _fill(program: _Program, arrived: list[Tensor]) -> None:
        if program.local_to:
            torch._foreach_copy_(program.local_to, program.local_from)
        for views, buffer in zip(program.incoming, arrived, strict=True):
            torch._foreach_copy_(views, _split(buffer, views))

    def _like(self, bucket: Bucket) -> Tensor | None:
        """Any weight of the bucket on this rank, for device and dtype; None where the rank has no part in it."""
        for storage, names in ((self._source, bucket.sources), (self._destination, bucket.destinations)):
            for name in names.get(self._rank, ()):
                return storage[name]
        return None


def _check_storage(
    kind: str, rank: int, parameters: Sequence[LocalParameter], storage: WeightStorage
) -> None:
    expected = {parameter.name: parameter.shape for parameter in parameters}
    missing = [name for name in expected if name not in storage]
    surplus = [name for name in storage.names if name not in expected]
    if missing or surplus:
        raise PlanError(
            f"rank {rank} of {kind}: the model lacks {missing or 'nothing'} and has {surplus or 'nothing'} besides"
            " what its layout says; use the layout of this model"
        )
    for name, shape in expected.items():
        if tuple(storage[name].shape) != shape:
            raise PlanError(
                f"rank {rank} of {kind}: {name} has shape {tuple(storage[name].shape)}, its layout says {shape};"
                " use the layout of this model"
            )


def _flat(num_elements: int, like: Tensor) -> Tensor:
    return torch.empty(num_elements, dtype=like.dtype, device=like.device)


def _view(storage: WeightStorage, place: Place, move: Move) -> Tensor:
    view = storage[place.parameter]
    for dim, (start, size) in enumerate(zip(place.offset, move.shape, strict=True)):
        view = view.narrow(dim, start, size)
    return view


def _split(buffer: Tensor, views: list[Tensor]) -> list[Tensor]:
    """Consecutive parts of a flat buffer, shaped like `views`."""
    parts = torch.split(buffer, [view.numel() for view in views])
    return [part.view(view.shape) for part, view in zip(parts, views, strict=True)]
