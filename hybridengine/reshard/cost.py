"""Costs of a plan, counted from the plan itself: bytes received and sent, peak and redundant bytes of every rank.

The formulas of the paper's table 2 (HybridFlow, arXiv 2409.19256) are tests of this file, not a part of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from hybridengine.reshard.boxes import num_elements
from hybridengine.reshard.layout import Layout
from hybridengine.reshard.plan import Bucket, Plan
from hybridengine.topology.links import LinkClass, NodeMap

REMOTE = (LinkClass.SAME_NODE, LinkClass.BETWEEN_NODES)


@dataclass
class Traffic:
    """Elements that one rank moves in one step of one bucket."""

    received: Counter[LinkClass] = field(default_factory=Counter)
    sent: Counter[LinkClass] = field(default_factory=Counter)
    messages: Counter[LinkClass] = field(default_factory=Counter)
    """Messages sent and received."""
    gathered: int = 0
    """Copied into messages before they leave."""
    spread: int = 0
    """Copied out of messages to where they belong."""
    copied: int = 0
    """Copied from the rank's own source shard into its destination shard."""


@dataclass(frozen=True)
class RankCost:
    """Bytes of one rank over one execution of a plan."""

    received_by_link: dict[LinkClass, int]
    sent_by_link: dict[LinkClass, int]
    copied_bytes: int
    """Copied inside the rank, from one shard to the other."""
    source_bytes: int
    """Storage of the shard before, padding included."""
    destination_bytes: int
    """Storage of the shard after, padding included."""
    redundant_bytes: int
    """Held twice: source parameters that the plan retains, because the rank could not cut them out of its destination
    shard; on the way back, the destination parameters that were retained on the way there."""
    extra_bytes: int
    """Received beyond what the rank would receive if its source shard were part of its destination shard."""
    one_copy_bytes: int
    """Of every bucket the larger of its two forms: the larger shard, where one form is the larger in all buckets; of a
    rank that only serves others, its shard."""
    bucket_bytes: int
    """Most destination and staging bytes of the buckets in flight at one time."""
    memory_bytes: tuple[int, ...]
    """Weights and staging held before the first bucket, then whenever a bucket opens or closes."""

    @property
    def received_bytes(self) -> int:
        return sum(self.received_by_link.values())

    @property
    def sent_bytes(self) -> int:
        return sum(self.sent_by_link.values())

    @property
    def peak_bytes(self) -> int:
        """Most weight and staging bytes at any moment."""
        return max(self.memory_bytes)

    @property
    def peak_bound_bytes(self) -> int:
        """What one copy of the weights allows, with what is held twice and the buckets in flight."""
        return self.one_copy_bytes + self.redundant_bytes + self.bucket_bytes


def plan_costs(plan: Plan, element_bytes: int, nodes: NodeMap | None = None) -> dict[int, RankCost]:
    """Return the cost of `plan` for each of its ranks, for weights of `element_bytes` each.

    Args:
        nodes: which ranks share a node; None where all do.
    """
    totals = {rank: Traffic() for rank in plan.ranks}
    for rounds in plan_traffic(plan, nodes):
        for step in rounds:
            for rank, traffic in step.items():
                totals[rank].received.update(traffic.received)
                totals[rank].sent.update(traffic.sent)
                totals[rank].copied += traffic.copied
    return {rank: _rank_cost(plan, rank, totals[rank], element_bytes) for rank in plan.ranks}


def plan_traffic(plan: Plan, nodes: NodeMap | None = None) -> Iterator[list[dict[int, Traffic]]]:
    """Yield for each bucket, for each of its steps: rank -> what it does; ranks that do nothing are left out."""
    for bucket in plan.buckets:
        yield _bucket_traffic(bucket, nodes)


def _bucket_traffic(bucket: Bucket, nodes: NodeMap | None) -> list[dict[int, Traffic]]:
    steps = [defaultdict[int, Traffic](Traffic) for _ in range(bucket.num_steps)]
    for move in bucket.moves:
        if move.is_local:
            steps[0][move.source.rank].copied += move.num_elements
    for pack in bucket.packs:
        step, size = steps[pack.step], pack.num_elements
        sender = step[pack.source_rank]
        if not pack.sent_in_place:
            sender.gathered += size
        for rank, in_place in zip(pack.receivers, pack.received_in_place, strict=True):
            link = nodes.link(pack.source_rank, rank) if nodes else LinkClass.SAME_NODE
            receiver = step[rank]
            receiver.received[link] += size
            receiver.messages[link] += 1
            receiver.spread += 0 if in_place else size
            sender.sent[link] += size
            sender.messages[link] += 1
    return [dict(step) for step in steps]


def _rank_cost(plan: Plan, rank: int, traffic: Traffic, element_bytes: int) -> RankCost:
    source = _sizes(plan.source, rank)
    destination = _sizes(plan.destination, rank)
    received = sum(traffic.received.values())
    kept = sum(source[name] for name in plan.retained(rank))
    twice = kept if rank in plan.destination.keys else 0
    filled = {name for bucket in plan.buckets for name in bucket.destinations.get(rank, ())}
    waiting = sum(size for name, size in destination.items() if name not in filled)
    memory, in_flight = _memory(plan, rank, source, destination, waiting)
    held_pieces, needed_pieces = _num_logical(plan.source, rank), _num_logical(plan.destination, rank)
    return RankCost(
        received_by_link={link: traffic.received[link] * element_bytes for link in REMOTE},
        sent_by_link={link: traffic.sent[link] * element_bytes for link in REMOTE},
        copied_bytes=traffic.copied * element_bytes,
        source_bytes=sum(source.values()) * element_bytes,
        destination_bytes=sum(destination.values()) * element_bytes,
        redundant_bytes=(twice + waiting) * element_bytes,
        extra_bytes=max(0, received - max(0, needed_pieces - held_pieces)) * element_bytes,
        one_copy_bytes=(kept - twice + sum(map(max, _forms(plan, rank, source, destination))))
        * element_bytes,
        bucket_bytes=in_flight * element_bytes,
        memory_bytes=tuple(held * element_bytes for held in memory),
    )


def _memory(
    plan: Plan, rank: int, source: dict[str, int], destination: dict[str, int], waiting: int
) -> tuple[list[int], int]:
    """Return (elements held at each event, most elements of the buckets in flight), as the executor holds them.

    `waiting` are destination elements that are there from the start. A bucket opens: its staging and its destination
    appear, and the one before it closes unless they overlap; it closes: staging and source go.
    """
    held, largest = sum(source.values()) + waiting, 0
    memory = [held]
    opened: list[tuple[int, int, int]] = []  # staging, destination, source of the buckets in flight

    def close_oldest() -> None:
        nonlocal held
        staging, _, released = opened.pop(0)
        held -= staging + released
        memory.append(held)

    for bucket, (vanishes, appears) in zip(
        plan.buckets, _forms(plan, rank, source, destination), strict=True
    ):
        if opened and not bucket.overlaps:
            close_oldest()
        opened.append((bucket.staging.get(rank, 0), appears, vanishes))
        held += opened[-1][0] + appears
        memory.append(held)
        largest = max(largest, sum(staging + appears for staging, appears, _ in opened))
        if len(opened) > 1:
            close_oldest()
    while opened:
        close_oldest()
    return memory, largest


def _forms(
    plan: Plan, rank: int, source: dict[str, int], destination: dict[str, int]
) -> list[tuple[int, int]]:
    """Return for each bucket: elements that `rank` gives up, elements that it fills."""
    return [
        (
            sum(source[name] for name in bucket.sources.get(rank, ())),
            sum(destination[name] for name in bucket.destinations.get(rank, ())),
        )
        for bucket in plan.buckets
    ]


def _sizes(layout: Layout, rank: int) -> dict[str, int]:
    """Return parameter -> elements of its storage; empty for a rank outside of the layout."""
    return {parameter.name: parameter.num_elements for parameter in layout.held(rank).parameters}


def _num_logical(layout: Layout, rank: int) -> int:
    """Return the elements of logical tensors that a rank holds, each piece once."""
    boxes = {(tensor, piece.box) for tensor, held in layout.held(rank).pieces.items() for _, piece in held}
    return sum(num_elements(box) for _, box in boxes)
