"""Moves of each box from a sender to its receivers.

A rank never fetches a box that it holds. Other boxes come from an owner in the domain, preferably on the same node,
and among equals from the owner that has sent least so far. A box that no rank of a node holds is sent to the node once,
to the rank that has received least so far, and then forwarded to the other ranks of that node in a second step. With
stages on different nodes, this is a gather across pipeline stages followed by one across tensor shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


class _Delivery(NamedTuple):
    """A part of a box for the ranks of one node: `owners` may send it, and `receivers` need it."""

    tensor: str
    part: Box
    size: int
    owners: list[_Holding]
    receivers: list[_Holding]
    enters: bool
    """True if one of the receivers gets the part, and forwards it to the other ranks."""


Choice = tuple[int, int]
"""Indices of the owner that sends a part, and of the receiver through which it enters the node."""


class Gather:
    """Computes the moves of one group of fused tensors after another in a domain; senders are balanced over all."""

    def __init__(
        self,
        source: Layout,
        destination: Layout,
        ranks: tuple[int, ...],
        nodes: NodeMap | None = None,
        two_step: bool = True,
    ) -> None:
        self._source = source
        self._held, self._needed = (
            [(rank, layout.held(rank).pieces) for rank in ranks] for layout in (source, destination)
        )
        self._node_of = {rank: nodes.node_of(rank) if nodes else 0 for rank in ranks}
        self._two_step = two_step
        self._sent = dict.fromkeys(ranks, 0)
        self._entered = dict.fromkeys(ranks, 0)
        self._parts: dict[str, tuple[list[Move], list[_Delivery]]] = {}

    def choose(self, tensors: tuple[str, ...]) -> tuple[Choice, ...]:
        """Return the senders of `tensors`, or of others of the same pattern, and count what they send.

        PlanError if no rank of the domain holds a box.
        """
        return tuple([self._choice(delivery) for tensor in tensors for delivery in self._parts_of(tensor)[1]])

    def moves(self, tensors: tuple[str, ...], choices: tuple[Choice, ...]) -> list[Move]:
        """Return the moves that fill all pieces of `tensors`, from the chosen senders."""
        moves: list[Move] = []
        chosen = iter(choices)
        for tensor in tensors:
            local, deliveries = self._parts_of(tensor)
            moves += local
            for delivery in deliveries:
                moves += _delivered(delivery, *next(chosen))
        return moves

    def _parts_of(self, tensor: str) -> tuple[list[Move], list[_Delivery]]:
        """Return the local moves of a tensor, and the parts that ranks must fetch."""
        if tensor not in self._parts:
            self._parts[tensor] = self._divided(tensor)
        return self._parts[tensor]

    def _divided(self, tensor: str) -> tuple[list[Move], list[_Delivery]]:
        owners: dict[Box, list[_Holding]] = {}
        own: dict[int, list[_Holding]] = {}
        for holding in _holdings(self._held, tensor):
            owners.setdefault(holding.piece.box, []).append(holding)
            own.setdefault(holding.rank, []).append(holding)
        moves: list[Move] = []
        cuts: dict[Box, _Parts] = {}
        demands: dict[tuple[Box, Box], list[_Holding]] = {}
        for need in _holdings(self._needed, tensor):
            own_boxes = [(holding, holding.piece.box) for holding in own.get(need.rank, ())]
            parts, missing = cover(need.piece.box, own_boxes)
            moves += [Move(tensor, part, holding.place(part), need.place(part)) for holding, part in parts]
            for wanted in reversed(missing):
                if wanted not in cuts:
                    cuts[wanted] = self._cut(tensor, need, wanted, owners)
                for part in cuts[wanted]:
                    demands.setdefault(part, []).append(need)
        deliveries = []
        for (part, box), needs in demands.items():
            deliveries += self._by_node(tensor, part, owners[box], needs)
        return moves, deliveries

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

    def _by_node(
        self, tensor: str, part: Box, owners: list[_Holding], needs: list[_Holding]
    ) -> Iterator[_Delivery]:
        by_node: dict[int, list[_Holding]] = {}
        for need in needs:
            by_node.setdefault(self._node_of[need.rank], []).append(need)
        for node, receivers in by_node.items():
            near = [owner for owner in owners if self._node_of[owner.rank] == node]
            enters = self._two_step and not near
            yield _Delivery(tensor, part, num_elements(part), near or owners, receivers, enters)

    def _choice(self, delivery: _Delivery) -> Choice:
        """Return the owner that has sent least, and the receiver through which least has entered."""
        _, _, size, owners, receivers, enters = delivery
        sender = _least(self._sent, owners)
        entry, direct = 0, len(receivers)
        if enters:
            entry = _least(self._entered, receivers)
            rank = receivers[entry].rank
            self._entered[rank] += size
            direct = sum([need.rank == rank for need in receivers])
            self._sent[rank] += size * (len(receivers) - direct)
        self._sent[owners[sender].rank] += size * direct
        return sender, entry


def _least(counts: dict[int, int], holdings: list[_Holding]) -> int:
    """Return the index of the holding whose rank has the least count."""
    if len(holdings) == 1:
        return 0
    return min(range(len(holdings)), key=lambda index: (counts[holdings[index].rank], holdings[index].rank))


def _delivered(delivery: _Delivery, sender: int, entry: int) -> list[Move]:
    """Return the moves of a part from the chosen sender to the receivers of one node."""
    tensor, part, _, owners, receivers, enters = delivery
    direct, passed_on = receivers, list[_Holding]()
    if enters:
        rank = receivers[entry].rank
        direct = [need for need in receivers if need.rank == rank]
        passed_on = [need for need in receivers if need.rank != rank]
    source, relay = owners[sender].place(part), direct[0].place(part)
    return [
        *[Move(tensor, part, source, need.place(part)) for need in direct],
        *[Move(tensor, part, relay, need.place(part), step=1) for need in passed_on],
    ]


def _holdings(held: list[tuple[int, dict[str, list[tuple[str, Piece]]]]], tensor: str) -> list[_Holding]:
    """Return the pieces of a tensor with their holders, in rank order, given the pieces of all ranks."""
    return [_Holding(rank, *where) for rank, pieces in held if tensor in pieces for where in pieces[tensor]]
