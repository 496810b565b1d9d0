"""Moves of each box from a sender to its receivers.

A rank never fetches a box that it holds. Other boxes come from an owner in the domain, preferably on the same node,
and among equals from the owner that has sent least so far. A box that no rank of a node holds is sent to the node once,
to the rank that has received least so far, and then forwarded to the other ranks of that node in a second step. With
stages on different nodes, this is a gather across pipeline stages followed by one across tensor shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hybridengine.errors import PlanError
from hybridengine.reshard.boxes import Box, cover, intersect, num_elements, subtract
from hybridengine.reshard.layout import Layout, Piece
from hybridengine.reshard.plan import Move, Place
from hybridengine.topology.links import NodeMap

_Parts = list[tuple[Box, Box]]


class _Holding(NamedTuple):
    rank: int
    parameter: str
    piece: Piece

    def place(self, part: Box) -> Place:
        return Place(self.rank, self.parameter, self.piece.start_in_parameter(part))


class Gather:
    """Computes the moves of one logical tensor after another in a domain; senders are balanced over all of them."""

    def __init__(
        self,
        source: Layout,
        destination: Layout,
        ranks: tuple[int, ...],
        nodes: NodeMap | None = None,
        two_step: bool = True,
    ) -> None:
        self._source = source
        self._held, self._needed = _holdings(source, ranks), _holdings(destination, ranks)
        self._node_of = {rank: nodes.node_of(rank) if nodes else 0 for rank in ranks}
        self._two_step = two_step
        self._sent = dict.fromkeys(ranks, 0)
        self._entered = dict.fromkeys(ranks, 0)
        # Cuts are cached, because all layers are alike.
        self._cuts: dict[tuple[int, Box], _Parts] = {}
        self._owner_sets: dict[tuple[Box, ...], int] = {}

    def moves(self, tensor: str) -> list[Move]:
        """Return the moves that fill all pieces of `tensor`; PlanError if no rank of the domain holds a box."""
        owners: dict[Box, list[_Holding]] = {}
        own: dict[int, list[_Holding]] = {}
        for holding in self._held.get(tensor, ()):
            owners.setdefault(holding.piece.box, []).append(holding)
            own.setdefault(holding.rank, []).append(holding)
        owner_set = self._owner_sets.setdefault(tuple(owners), len(self._owner_sets))
        moves: list[Move] = []
        demands: dict[tuple[Box, Box], list[_Holding]] = {}
        for need in self._needed.get(tensor, ()):
            own_boxes = [(holding, holding.piece.box) for holding in own.get(need.rank, ())]
            parts, missing = cover(need.piece.box, own_boxes)
            moves += [Move(tensor, part, holding.place(part), need.place(part)) for holding, part in parts]
            for wanted in reversed(missing):
                if (owner_set, wanted) not in self._cuts:
                    self._cuts[owner_set, wanted] = self._cut(tensor, need, wanted, owners)
                for part in self._cuts[owner_set, wanted]:
                    demands.setdefault(part, []).append(need)
        for (part, box), needs in demands.items():
            moves += self._deliver(tensor, part, owners[box], needs)
        return moves

    def _cut(self, tensor: str, need: _Holding, wanted: Box, owners: Iterable[Box]) -> _Parts:
        """Return (part, held box) of a box that a rank must fetch, cut so that each part lies in one held box."""
        parts, missing = [], [wanted]
        while missing:
            box = missing.pop()
            found = [(part, held) for held in owners if (part := intersect(held, box)) is not None]
            if not found:
                raise PlanError(
                    f"{tensor}{list(box)}, which rank {need.rank} needs for {need.parameter}, is held by no rank of"
                    f" {self._source.kind} in the domain; the domain must hold a whole model"
                )
            part, held = max(found, key=lambda pair: num_elements(pair[0]))
            parts.append((part, held))
            if part != box:
                missing += subtract(box, part)
        return parts

    def _deliver(self, tensor: str, part: Box, owners: list[_Holding], needs: list[_Holding]) -> list[Move]:
        size = num_elements(part)
        by_node: dict[int, list[_Holding]] = {}
        for need in needs:
            by_node.setdefault(self._node_of[need.rank], []).append(need)
        moves = []
        for node, receivers in by_node.items():
            near = [owner for owner in owners if self._node_of[owner.rank] == node]
            owner = min(near or owners, key=lambda holding: (self._sent[holding.rank], holding.rank))
            direct, passed_on = receivers, list[_Holding]()
            if not near and self._two_step:
                entry = min(receivers, key=lambda holding: (self._entered[holding.rank], holding.rank))
                self._entered[entry.rank] += size
                direct = [need for need in receivers if need.rank == entry.rank]
                passed_on = [need for need in receivers if need.rank != entry.rank]
            source = owner.place(part)
            moves += [Move(tensor, part, source, need.place(part)) for need in direct]
            self._sent[owner.rank] += size * len(direct)
            if passed_on:
                relay = direct[0].place(part)
                moves += [Move(tensor, part, relay, need.place(part), step=1) for need in passed_on]
                self._sent[relay.rank] += size * len(passed_on)
        return moves


def _holdings(layout: Layout, ranks: tuple[int, ...]) -> dict[str, list[_Holding]]:
    """Return logical tensor -> its pieces with their holders, in rank order."""
    found: dict[str, list[_Holding]] = {}
    for rank in ranks:
        for tensor, held in layout.held(rank).pieces.items():
            found.setdefault(tensor, []).extend([_Holding(rank, *where) for where in held])
    return found
