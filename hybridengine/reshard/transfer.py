"""Transfers of fused tensors: moves, messages and sizes, which groups of the same pattern have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridengine.reshard.alike import FusedGroup
from hybridengine.reshard.boxes import cover
from hybridengine.reshard.layout import Layout, LocalParameter, Shard, ShardKey
from hybridengine.reshard.plan import Bucket, Move, Pack, Place


class Domain:
    """Ranks of a plan, and their shards in both layouts."""

    def __init__(self, source: Layout, destination: Layout, ranks: tuple[int, ...]) -> None:
        self.source, self.destination, self.ranks = source, destination, ranks
        self.shards: list[Shard] = []
        self.holders: list[list[int]] = []
        """Ranks of each of `shards`."""
        self._numbers: tuple[dict[ShardKey, int], dict[ShardKey, int]] = {}, {}
        for layout, numbers in zip((source, destination), self._numbers, strict=True):
            for rank in ranks:
                if (key := layout.keys.get(rank)) is None:
                    continue
                if key not in numbers:
                    numbers[key] = len(self.shards)
                    self.shards.append(layout.shards[key])
                    self.holders.append([])
                self.holders[numbers[key]].append(rank)

    def by_rank(self, counts: dict[int, int]) -> np.ndarray:
        """Return the counts of all ranks, in the order of `ranks`."""
        return np.array([counts.get(rank, 0) for rank in self.ranks])

    def source_number(self, rank: int) -> int:
        """Return the index of a rank's source shard in `shards`."""
        return self._numbers[0][self.source.keys[rank]]

    def destination_number(self, rank: int) -> int:
        """Return the index of a rank's destination shard in `shards`."""
        return self._numbers[1][self.destination.keys[rank]]

    def filled(self, rank: int, tensors: Sequence[str]) -> list[LocalParameter]:
        """Return the destination parameters of `tensors` on a rank."""
        return self.destination.held(rank).parameters_of(tensors)

    def released(self, rank: int, tensors: Sequence[str]) -> list[LocalParameter]:
        """Return the source parameters of `tensors` that a rank's destination shard contains completely."""
        if rank not in self.destination.keys:
            return []
        own = self.destination.held(rank)
        return [
            parameter
            for parameter in self.source.held(rank).parameters_of(tensors)
            if not any(cover(piece.box, own.boxes(piece.tensor))[1] for piece in parameter.pieces)
        ]


class Transfer:
    """A transfer of one group, for all groups of its pattern with the same senders.

    Shapes: R ranks of the domain. Units: elements.
    """

    in_flight_R: np.ndarray
    """Elements of staging and destination parameters, which are allocated while a group is in flight."""
    held_R: np.ndarray
    """Elements of staging and released source parameters, held in addition to the destination."""
    senders: frozenset[int]
    """Ranks that send out of the source layout."""

    def __init__(self, first: FusedGroup, moves: list[Move], packs: list[Pack], domain: Domain) -> None:
        tensors = {tensor: index for index, tensor in enumerate(first.tensors)}
        shards = [number for number, *_ in first.pattern]
        names = {where: index for index, where in enumerate(zip(shards, first.names, strict=True))}

        def source(place: Place, step: int) -> int:
            number = domain.destination_number if step else domain.source_number
            return names[number(place.rank), place.parameter]

        def destination(rank: int, name: str) -> int:
            return names[domain.destination_number(rank), name]

        self._moves = [
            (move, tensors[move.tensor], source(move.source, move.step), destination(*move.destination[:2]))
            for move in moves
        ]
        numbers = {move: number for number, move in enumerate(moves)}
        self._packs = [(pack, [[numbers[move] for move in part] for part in pack.moves]) for pack in packs]
        holders = sorted({rank for number in set(shards) for rank in domain.holders[number]})
        filled = {rank: domain.filled(rank, first.tensors) for rank in holders}
        released = {rank: domain.released(rank, first.tensors) for rank in holders}
        self._filled = [
            (rank, [destination(rank, one.name) for one in own]) for rank, own in filled.items() if own
        ]
        self._released = [
            (rank, [names[domain.source_number(rank), one.name] for one in own])
            for rank, own in released.items()
            if own
        ]
        staged_R = domain.by_rank(Bucket((), (), tuple(packs), {}, {}).staging)
        self.in_flight_R, self.held_R = (
            staged_R
            + domain.by_rank({rank: sum([one.num_elements for one in own]) for rank, own in held.items()})
            for held in (filled, released)
        )
        self.size = int(self.in_flight_R.max())
        self.senders = frozenset(pack.source_rank for pack in packs if pack.step == 0)

    def moves_of(self, group: FusedGroup) -> list[Move]:
        """Return the moves of a group of the pattern."""
        tensors, names = group.tensors, group.names
        return [
            Move(
                tensors[tensor],
                move.box,
                Place(move.source.rank, names[source], move.source.offset),
                Place(move.destination.rank, names[destination], move.destination.offset),
                move.step,
            )
            for move, tensor, source, destination in self._moves
        ]

    def packs_of(self, moves: Sequence[Move]) -> list[Pack]:
        """Return the messages of a group with these moves."""
        return [
            Pack(
                pack.step,
                pack.source_rank,
                pack.receivers,
                tuple([tuple([moves[number] for number in part]) for part in parts]),
                pack.num_elements,
                pack.sent_in_place,
                pack.received_in_place,
            )
            for pack, parts in self._packs
        ]

    def filled(self, group: FusedGroup) -> list[tuple[int, list[str]]]:
        """Return (rank, destination parameters that a group fills)."""
        return [(rank, [group.names[index] for index in own]) for rank, own in self._filled]

    def released(self, group: FusedGroup) -> list[tuple[int, list[str]]]:
        """Return (rank, source parameters that a group releases)."""
        return [(rank, [group.names[index] for index in own]) for rank, own in self._released]
