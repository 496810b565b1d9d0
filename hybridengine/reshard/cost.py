"""Costs of a plan, computed from the plan itself: bytes received and sent, peak and redundant bytes of every rank.

The formulas of the paper's table 2 (HybridFlow, arXiv 2409.19256) are used only in the tests.

Shapes: K buckets, L link classes (`REMOTE`), D directions (received, sent), S steps, P copies (packed into messages,
unpacked from them, copied within a rank), R ranks in the plan's order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridengine.reshard.plan import Pack, Plan
from hybridengine.topology.links import LinkClass, NodeMap

REMOTE = (LinkClass.SAME_NODE, LinkClass.BETWEEN_NODES)
"""Links of ranks on one node, and of ranks on two."""
NUM_STEPS = 2
"""Steps of a plan: transfer from the source layout, and forwarding within a node."""
GATHERED, SPREAD, COPIED = range(3)


@dataclass(frozen=True)
class Traffic:
    """Elements that each rank of a plan moves, and messages that it sends and receives."""

    moved_KLDSR: np.ndarray
    messages_KLSR: np.ndarray
    copied_KPR: np.ndarray
    overlaps_K: np.ndarray
    """True where a bucket's messages may be sent before the previous bucket has arrived and is unpacked."""


@dataclass(frozen=True)
class RankCost:
    """Bytes of one rank during one execution of a plan."""

    received_by_link: dict[LinkClass, int]
    sent_by_link: dict[LinkClass, int]
    copied_bytes: int
    """Bytes copied within the rank from one shard to the other."""
    source_bytes: int
    """Storage of the source shard, padding included."""
    destination_bytes: int
    """Storage of the destination shard, padding included."""
    redundant_bytes: int
    """Bytes held twice: source parameters that the plan retains because they cannot be cut out of the destination
    shard; for the inverse plan, the destination parameters that the forward plan retained."""
    extra_bytes: int
    """Bytes received beyond those needed if the rank's source shard were part of its destination shard."""
    one_copy_bytes: int
    """Sum over all buckets of the larger of source and destination form: the size of the larger shard, if the same form
    is larger in all buckets; for a rank that only serves others, the size of its shard."""
    bucket_bytes: int
    """Peak destination and staging bytes of the buckets in flight."""
    memory_bytes: tuple[int, ...]
    """Weight and staging bytes before the first bucket, and after each opening or closing of a bucket."""

    @property
    def received_bytes(self) -> int:
        return sum(self.received_by_link.values())

    @property
    def peak_bytes(self) -> int:
        """Peak weight and staging bytes."""
        return max(self.memory_bytes)


def plan_costs(plan: Plan, element_bytes: int, nodes: NodeMap | None = None) -> dict[int, RankCost]:
    """Return the cost of `plan` for each of its ranks; without `nodes`, all ranks share one."""
    return rank_costs(plan, plan_traffic(plan, nodes), element_bytes)


def rank_costs(plan: Plan, traffic: Traffic, element_bytes: int) -> dict[int, RankCost]:
    moved_LDR, copied_R = traffic.moved_KLDSR.sum(axis=(0, 3)), traffic.copied_KPR[:, COPIED].sum(axis=0)
    return {
        rank: _rank_cost(plan, rank, moved_LDR[:, :, place].tolist(), int(copied_R[place]), element_bytes)
        for place, rank in enumerate(plan.ranks)
    }


def plan_traffic(plan: Plan, nodes: NodeMap | None = None) -> Traffic:
    """Return the elements that each rank moves in each bucket and step; without `nodes`, all ranks share one."""
    place_of = {rank: place for place, rank in enumerate(plan.ranks)}
    node_of = {rank: nodes.node_of(rank) if nodes else 0 for rank in plan.ranks}
    moved, copied = [], []
    for k, bucket in enumerate(plan.buckets):
        for move in bucket.moves:
            if move.is_local:
                copied.append((k, COPIED, place_of[move.source.rank], move.num_elements))
        alike: dict[tuple[object, ...], list[Pack]] = {}
        for pack in bucket.packs:
            ends = pack.step, pack.source_rank, pack.receivers, pack.sent_in_place, pack.received_in_place
            alike.setdefault(ends, []).append(pack)
        for packs in alike.values():
            pack, count, size = packs[0], len(packs), sum([pack.num_elements for pack in packs])
            sender = place_of[pack.source_rank]
            if not pack.sent_in_place:
                copied.append((k, GATHERED, sender, size))
            for rank, in_place in zip(pack.receivers, pack.received_in_place, strict=True):
                link, receiver = int(node_of[pack.source_rank] != node_of[rank]), place_of[rank]
                moved.append((k, link, 0, pack.step, receiver, size, count))
                moved.append((k, link, 1, pack.step, sender, size, count))
                if not in_place:
                    copied.append((k, SPREAD, receiver, size))
    num_buckets, num_ranks = len(plan.buckets), len(plan.ranks)
    moved_KLDSR = np.zeros((num_buckets, len(REMOTE), 2, NUM_STEPS, num_ranks), dtype=np.int64)
    messages_KLDSR = np.zeros_like(moved_KLDSR)
    copied_KPR = np.zeros((num_buckets, 3, num_ranks), dtype=np.int64)
    *places, sizes, counts = np.array(moved, dtype=np.int64).reshape(-1, 7).T
    np.add.at(moved_KLDSR, tuple(places), sizes)
    np.add.at(messages_KLDSR, tuple(places), counts)
    *places, sizes = np.array(copied, dtype=np.int64).reshape(-1, 4).T
    np.add.at(copied_KPR, tuple(places), sizes)
    overlaps_K = np.array([bucket.overlaps for bucket in plan.buckets], dtype=bool)
    return Traffic(moved_KLDSR, messages_KLDSR.sum(axis=2), copied_KPR, overlaps_K)


def _rank_cost(plan: Plan, rank: int, moved_LD: list[list[int]], copied: int, element_bytes: int) -> RankCost:
    source_shard, destination_shard = plan.source.held(rank), plan.destination.held(rank)
    source, destination = source_shard.sizes, destination_shard.sizes
    received = sum(received for received, _ in moved_LD)
    kept = sum(source[name] for name in plan.retained(rank))
    twice = kept if rank in plan.destination.keys else 0
    filled = {name for bucket in plan.buckets for name in bucket.destinations.get(rank, ())}
    waiting = sum(size for name, size in destination.items() if name not in filled)
    forms = [
        (
            sum(source[name] for name in bucket.sources.get(rank, ())),
            sum(destination[name] for name in bucket.destinations.get(rank, ())),
        )
        for bucket in plan.buckets
    ]
    memory, in_flight = _memory(plan, rank, forms, sum(source.values()) + waiting)
    lacking = max(0, destination_shard.num_logical - source_shard.num_logical)
    return RankCost(
        received_by_link={
            link: received * element_bytes for link, (received, _) in zip(REMOTE, moved_LD, strict=True)
        },
        sent_by_link={link: sent * element_bytes for link, (_, sent) in zip(REMOTE, moved_LD, strict=True)},
        copied_bytes=copied * element_bytes,
        source_bytes=sum(source.values()) * element_bytes,
        destination_bytes=sum(destination.values()) * element_bytes,
        redundant_bytes=(twice + waiting) * element_bytes,
        extra_bytes=max(0, received - lacking) * element_bytes,
        one_copy_bytes=(kept - twice + sum(map(max, forms))) * element_bytes,
        bucket_bytes=in_flight * element_bytes,
        memory_bytes=tuple(held * element_bytes for held in memory),
    )


def _memory(plan: Plan, rank: int, forms: list[tuple[int, int]], held: int) -> tuple[list[int], int]:
    """Return (elements held after each event, most in flight) in the executor's order, given each bucket's
    (released, filled) elements."""
    memory, largest = [held], 0
    opened: list[tuple[int, int]] = []  # elements that a bucket in flight takes, and that its end frees
    for bucket, (vanishes, appears) in zip(plan.buckets, forms, strict=True):
        while opened and not (bucket.overlaps and len(opened) == 1):
            memory.append(memory[-1] - opened.pop(0)[1])
        staging = bucket.staging.get(rank, 0)
        opened.append((staging + appears, staging + vanishes))
        memory.append(memory[-1] + staging + appears)
        largest = max(largest, sum(taken for taken, _ in opened))
    for _, freed in opened:
        memory.append(memory[-1] - freed)
    return memory, largest
