"""Messages of a plan: boxes that travel together, and boxes that are sent and received in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hybridengine.reshard.boxes import Box, extents
from hybridengine.reshard.layout import Layout
from hybridengine.reshard.plan import Move, Pack, Place


def packed(moves: Iterable[Move], source: Layout, destination: Layout, direct_elements: int) -> list[Pack]:
    """Return one message per box that moves between ranks; a rank that needs it in two parameters gets it twice."""
    copies: dict[tuple[int, str, Box, Place], list[dict[int, Move]]] = {}
    for move in moves:
        if move.is_local:
            continue
        rounds = copies.setdefault((move.step, move.tensor, move.box, move.source), [{}])
        if move.destination.rank in rounds[-1]:
            rounds.append({})
        rounds[-1][move.destination.rank] = move
    packs = []
    for receivers in (receivers for rounds in copies.values() for receivers in rounds):
        own = [receivers[rank] for rank in sorted(receivers)]
        first, size = own[0], own[0].num_elements
        sent, received = False, [False] * len(own)
        if size >= direct_elements:
            sent = _is_contiguous(destination if first.step else source, first.source, first.box)
            received = [_is_contiguous(destination, move.destination, move.box) for move in own]
        packs.append(
            Pack(
                step=first.step,
                source_rank=first.source.rank,
                receivers=tuple(move.destination.rank for move in own),
                moves=tuple((move,) for move in own),
                num_elements=size,
                sent_in_place=sent,
                received_in_place=tuple(received),
            )
        )
    return packs


def joined(packs: Sequence[Pack]) -> tuple[Pack, ...]:
    """Return the messages, with those that are staged on both sides joined per sender and set of receivers."""
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
    """True if a box is contiguous in its parameter's memory."""
    shape = layout.shards[layout.keys[place.rank]].by_name[place.parameter].shape
    whole_so_far = True
    for extent, size in zip(reversed(extents(box)), reversed(shape), strict=True):
        if not whole_so_far and extent != 1:
            return False
        whole_so_far = whole_so_far and extent == size
    return True
