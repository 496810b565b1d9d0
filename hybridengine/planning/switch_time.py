"""Predicted seconds of a switch, from what each rank moves in each bucket and what the cluster's links carry.

The model, for each bucket in turn:

    gather    copies into messages, at memory bandwidth (each byte is read and written)
    transfer  in each step, links of different classes work at the same time, both directions of a link too; a rank
              takes max(received, sent) / bandwidth + latency · messages on its busiest class; where the ranks of a node
              share a link, the node takes the sum of its ranks over the node's bandwidth
    spread    copies out of messages and inside the rank, at memory bandwidth

Every part ends when its slowest rank ends; all domains are in the same bucket at the same time. The spread of a bucket
overlaps with the transfer of the next one where the plan lets both be in flight. It is a prediction from figures of the
links, not a measurement: kernels, stragglers and other traffic are left out.

Shapes: K buckets, S steps, R ranks of a domain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridengine.planning.clusters import Cluster, Link
from hybridengine.reshard.cost import REMOTE, plan_traffic
from hybridengine.reshard.plan import Plan
from hybridengine.topology.grid import Groups
from hybridengine.topology.links import LinkClass, NodeMap

NUM_STEPS = 2
"""Out of the source layout, and passed on inside a node."""

NodeShare = frozenset[tuple[tuple[int, int], int]]
"""What a node hosts: (which domain, which of its ranks), and how often."""


@dataclass(frozen=True)
class DomainTraffic:
    """Elements that each rank of a domain moves, and the messages it takes."""

    received_KSR: Mapping[LinkClass, np.ndarray]
    sent_KSR: Mapping[LinkClass, np.ndarray]
    messages_KSR: Mapping[LinkClass, np.ndarray]
    gathered_KR: np.ndarray
    spread_KR: np.ndarray
    """Out of messages, and inside the rank."""
    overlaps_K: np.ndarray
    """Whether a bucket's messages may leave while the one before it is spread."""

    @classmethod
    def of(cls, plan: Plan, nodes: NodeMap) -> DomainTraffic:
        """Traffic of `plan`, its ranks in the order of `plan.ranks`."""
        position = {rank: index for index, rank in enumerate(plan.ranks)}
        num_buckets, num_ranks = len(plan.buckets), len(plan.ranks)
        received, sent, messages = (
            {link: np.zeros((num_buckets, NUM_STEPS, num_ranks), dtype=np.int64) for link in REMOTE}
            for _ in range(3)
        )
        gathered, spread = (np.zeros((num_buckets, num_ranks), dtype=np.int64) for _ in range(2))
        for k, steps in enumerate(plan_traffic(plan, nodes)):
            for s, traffic_of in enumerate(steps):
                for rank, traffic in traffic_of.items():
                    r = position[rank]
                    for link in REMOTE:
                        received[link][k, s, r] = traffic.received[link]
                        sent[link][k, s, r] = traffic.sent[link]
                        messages[link][k, s, r] = traffic.messages[link]
                    gathered[k, r] += traffic.gathered
                    spread[k, r] += traffic.spread + traffic.copied
        overlaps = np.array([bucket.overlaps for bucket in plan.buckets], dtype=bool)
        return cls(received, sent, messages, gathered, spread, overlaps)

    @property
    def num_buckets(self) -> int:
        return len(self.overlaps_K)


def node_shares(domains: Sequence[Groups], nodes: NodeMap) -> frozenset[NodeShare]:
    """The distinct contents of nodes.

    Args:
        domains: for each distinct domain, the ranks of all domains that repeat it.
    """
    hosted: dict[int, Counter[tuple[int, int]]] = {}
    for index, repeats in enumerate(domains):
        for ranks in repeats:
            for position, rank in enumerate(ranks):
                hosted.setdefault(nodes.node_of(rank), Counter())[index, position] += 1
    return frozenset(frozenset(members.items()) for members in hosted.values())


def predict_seconds(
    domains: Sequence[DomainTraffic], shares: Iterable[NodeShare], cluster: Cluster, element_bytes: int
) -> float:
    """Seconds from the first bucket's start to the last one's end, by the model above."""
    num_buckets = max(domain.num_buckets for domain in domains)
    domains = [_padded(domain, num_buckets) for domain in domains]
    shares = list(shares)
    memory = cluster.links.same_device

    def copying(part: str) -> np.ndarray:
        """Seconds of the slowest rank's copies, for each bucket."""
        bytes_KR = [2 * element_bytes * getattr(domain, part) for domain in domains]
        return _slowest(bytes_KR, None, shares, memory)

    transfer_KS = np.zeros((num_buckets, NUM_STEPS))
    for link in REMOTE:
        if not any(domain.messages_KSR[link].any() for domain in domains):
            continue
        messages_KSR = [domain.messages_KSR[link] for domain in domains]
        for direction in ("received_KSR", "sent_KSR"):
            bytes_KSR = [element_bytes * getattr(domain, direction)[link] for domain in domains]
            seconds_KS = _slowest(bytes_KSR, messages_KSR, shares, cluster.links.of(link))
            transfer_KS = np.maximum(transfer_KS, seconds_KS)
    gather_K, transfer_K, spread_K = copying("gathered_KR"), transfer_KS.sum(axis=1), copying("spread_KR")
    overlaps_K = np.all([domain.overlaps_K for domain in domains], axis=0)
    pending = 0.0  # the spread of the bucket before
    total = 0.0
    for gather, transfer, spread, overlaps in zip(gather_K, transfer_K, spread_K, overlaps_K, strict=True):
        total += gather + (max(transfer, pending) if overlaps else transfer + pending)
        pending = spread
    return float(total + pending)


def line_rate_seconds(
    domains: Sequence[DomainTraffic], shares: Iterable[NodeShare], cluster: Cluster, element_bytes: int
) -> float:
    """Seconds that the busiest link takes for its bytes, were it busy all the time: no order of buckets is faster."""
    shares = list(shares)
    seconds = [0.0]
    for link in REMOTE:
        for direction in ("received_KSR", "sent_KSR"):
            bytes_R = [
                element_bytes * getattr(domain, direction)[link].sum(axis=(0, 1)) for domain in domains
            ]
            if any(moved.any() for moved in bytes_R):
                figures = cluster.links.of(link).model_copy(update={"latency_s": 0.0})
                seconds.append(float(_slowest(bytes_R, None, shares, figures)))
    return max(seconds)


def _slowest(
    bytes_R: Sequence[np.ndarray],
    messages_R: Sequence[np.ndarray] | None,
    shares: Sequence[NodeShare],
    link: Link,
) -> np.ndarray:
    """Seconds of the slowest rank or node over one class of links; ranks are the last axis of each array.

    Without messages a rank that moves bytes pays the latency once.
    """
    counts_R = messages_R if messages_R is not None else [moved > 0 for moved in bytes_R]
    seconds = [
        (moved / link.bytes_per_s + link.latency_s * count).max(axis=-1)
        for moved, count in zip(bytes_R, counts_R, strict=True)
    ]
    if link.node_bytes_per_s is not None:
        for share in shares:
            moved = sum(bytes_R[index][..., position] * count for (index, position), count in share)
            seconds.append(np.asarray(moved) / link.node_bytes_per_s)
    return np.max(seconds, axis=0)


def _padded(domain: DomainTraffic, num_buckets: int) -> DomainTraffic:
    """The same traffic, with empty buckets at the end."""
    missing = num_buckets - domain.num_buckets

    def extended(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, np.zeros((missing, *values.shape[1:]), dtype=values.dtype)])

    return DomainTraffic(
        {link: extended(values) for link, values in domain.received_KSR.items()},
        {link: extended(values) for link, values in domain.sent_KSR.items()},
        {link: extended(values) for link, values in domain.messages_KSR.items()},
        extended(domain.gathered_KR),
        extended(domain.spread_KR),
        np.concatenate([domain.overlaps_K, np.ones(missing, dtype=bool)]),
    )
