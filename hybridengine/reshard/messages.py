"""Messages of a plan: which boxes travel together, and which are sent and received where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hybridengine.reshard.boxes import Box, extents, num_elements
from hybridengine.reshard.layout import Layout
from hybridengine.reshard.plan import Move, Pack, Place


class Packer:
    """Turns moves between ranks into messages.

    Args:
        direct_elements: least size of a box that is a message of its own where it is contiguous on a side.
    """

    def __init__(self, source: Layout, destination: Layout, direct_elements: int) -> None:
        self._source, self._destination = source, destination
        self._direct_elements = direct_elements

    def packs(self, moves: Iterable[Move]) -> list[Pack]:
        """A message per box; a box goes to all its receivers as one message.

        A rank that keeps a box in two parameters receives it twice.
        """
        copies: dict[tuple[int, str, Box, Place], list[dict[int, Move]]] = {}
        for move in moves:
            if move.is_local:
                continue
            rounds = copies.setdefault((move.step, move.tensor, move.box, move.source), [{}])
            if move.destination.rank in rounds[-1]:
                rounds.append({})
            rounds[-1][move.destination.rank] = move
        return [self._pack(receivers) for rounds in copies.values() for receivers in rounds]

    def _pack(self, receivers: dict[int, Move]) -> Pack:
        moves = [receivers[rank] for rank in sorted(receivers)]
        first = moves[0]
        size = num_elements(first.box)
        sent = False
        received = [False] * len(moves)
        if size >= self._direct_elements:
            sent = _is_contiguous(self._destination if first.step else self._source, first.source, first.box)
            received = [_is_contiguous(self._destination, move.destination, move.box) for move in moves]
        return Pack(
            step=first.step,
            source_rank=first.source.rank,
            receivers=tuple(move.destination.rank for move in moves),
            moves=tuple((move,) for move in moves),
            num_elements=size,
            sent_in_place=sent,
            received_in_place=tuple(received),
        )


def joined(packs: Sequence[Pack]) -> tuple[Pack, ...]:
    """The same messages, those that are staged on both sides joined to one per sender and set of receivers."""
    result: list[Pack] = []
    staged: dict[tuple[int, int, tuple[int, ...]], list[Pack]] = {}
    for pack in packs:
        if pack.sent_in_place or any(pack.received_in_place):
            result.append(pack)
        else:
            staged.setdefault((pack.step, pack.source_rank, pack.receivers), []).append(pack)
    for (step, source_rank, receivers), parts in staged.items():
        result.append(
            Pack(
                step=step,
                source_rank=source_rank,
                receivers=receivers,
                moves=tuple(
                    tuple(move for part in parts for move in part.moves[index])
                    for index in range(len(receivers))
                ),
                num_elements=sum(part.num_elements for part in parts),
                sent_in_place=False,
                received_in_place=(False,) * len(receivers),
            )
        )
    return tuple(result)


def _is_contiguous(layout: Layout, place: Place, box: Box) -> bool:
    """Whether a box is one run of its parameter's memory."""
    shape = layout.shards[layout.keys[place.rank]].by_name[place.parameter].shape
    whole_so_far = True
    # A parameter may have more dims than the box, which has one index of them.
    for extent, size in zip(reversed(extents(box)), reversed(shape), strict=False):
        if not whole_so_far and extent != 1:
            return False
        whole_so_far = whole_so_far and extent == size
    return True
