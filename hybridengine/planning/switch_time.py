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

Shapes: K buckets, L link classes (`REMOTE`), D directions (received, sent), S steps, P parts (gather, spread), R ranks of
the distinct domains side by side, N nodes that host different ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridengine.planning.clusters import Cluster, Link
from hybridengine.reshard.cost import REMOTE, plan_traffic
from hybridengine.reshard.plan import Plan
from hybridengine.topology.grid import Groups
from hybridengine.topology.links import NodeMap

NUM_STEPS = 2
"""Out of the source layout, and passed on inside a node."""


@dataclass(frozen=True)
class SwitchTraffic:
    """Elements that each rank moves, and the messages it takes."""

    moved_KLDSR: np.ndarray
    messages_KLSR: np.ndarray
    copied_KPR: np.ndarray
    """Into messages; out of messages and inside the rank."""
    overlaps_K: np.ndarray
    """True where a bucket's messages may leave while the one before it is spread."""

    @classmethod
    def of(cls, plan: Plan, nodes: NodeMap) -> SwitchTraffic:
        """Return the traffic of one domain, its ranks in the order of `plan.ranks`."""
        position = {rank: index for index, rank in enumerate(plan.ranks)}
        num_buckets, num_ranks = len(plan.buckets), len(plan.ranks)
        moved = np.zeros((num_buckets, len(REMOTE), 2, NUM_STEPS, num_ranks), dtype=np.int64)
        messages = np.zeros((num_buckets, len(REMOTE), NUM_STEPS, num_ranks), dtype=np.int64)
        copied = np.zeros((num_buckets, 2, num_ranks), dtype=np.int64)
        for k, steps in enumerate(plan_traffic(plan, nodes)):
            for s, traffic_of in enumerate(steps):
                for rank, traffic in traffic_of.items():
                    r = position[rank]
                    for place, link in enumerate(REMOTE):
                        moved[k, place, :, s, r] = traffic.received[link], traffic.sent[link]
                        messages[k, place, s, r] = traffic.messages[link]
                    copied[k, :, r] += (traffic.gathered, traffic.spread + traffic.copied)
        overlaps = np.array([bucket.overlaps for bucket in plan.buckets], dtype=bool)
        return cls(moved, messages, copied, overlaps)

    @classmethod
    def joined(cls, domains: Sequence[SwitchTraffic]) -> SwitchTraffic:
        """Return the traffic of several domains, which are in the same bucket at the same time."""
        num_buckets = max(len(domain.overlaps_K) for domain in domains)

        def padded(values: np.ndarray, filler: int = 0) -> np.ndarray:
            missing = [(0, num_buckets - len(values)), *[(0, 0)] * (values.ndim - 1)]
            return np.pad(values, missing, constant_values=filler)

        return cls(
            np.concatenate([padded(domain.moved_KLDSR) for domain in domains], axis=-1),
            np.concatenate([padded(domain.messages_KLSR) for domain in domains], axis=-1),
            np.concatenate([padded(domain.copied_KPR) for domain in domains], axis=-1),
            np.all([padded(domain.overlaps_K, True) for domain in domains], axis=0),
        )


def hosted_ranks(domains: Sequence[Groups], nodes: NodeMap) -> np.ndarray:
    """Return how often each node hosts each rank of the distinct domains, without nodes that host the same (`hosts_RN`).

    Args:
        domains: for each distinct domain, the ranks of all domains that repeat it.
    """
    num_nodes = len(nodes.ranks_per_node)
    hosts_RN = [
        np.bincount([nodes.node_of(rank) for rank in ranks], minlength=num_nodes)
        for repeats in domains
        for ranks in zip(*repeats, strict=True)
    ]
    return np.unique(hosts_RN, axis=1)


def predict_seconds(
    traffic: SwitchTraffic, hosts_RN: np.ndarray, cluster: Cluster, element_bytes: int
) -> float:
    """Return the seconds from the first bucket's start to the last one's end, by the model above."""
    moved_KLDSR = element_bytes * traffic.moved_KLDSR
    transfer_KS = np.zeros((len(traffic.overlaps_K), NUM_STEPS))
    for place, link in enumerate(REMOTE):
        messages_KSR = traffic.messages_KLSR[:, place]
        if messages_KSR.any():
            for moved_KSR in (moved_KLDSR[:, place, 0], moved_KLDSR[:, place, 1]):
                seconds_KS = _slowest(moved_KSR, messages_KSR, hosts_RN, cluster.links.of(link))
                transfer_KS = np.maximum(transfer_KS, seconds_KS)
    # Each byte is read and written.
    copied_KPR = 2 * element_bytes * traffic.copied_KPR
    copied_KP = _slowest(copied_KPR, copied_KPR > 0, hosts_RN, cluster.links.same_device)
    pending = 0.0  # the spread of the bucket before
    total = 0.0
    for (gather, spread), transfer, overlaps in zip(
        copied_KP, transfer_KS.sum(axis=1), traffic.overlaps_K, strict=True
    ):
        total += gather + (max(transfer, pending) if overlaps else transfer + pending)
        pending = spread
    return float(total + pending)


def line_rate_seconds(
    traffic: SwitchTraffic, hosts_RN: np.ndarray, cluster: Cluster, element_bytes: int
) -> float:
    """Return the seconds that the busiest link takes for its bytes; no order of buckets is faster."""
    seconds = [0.0]
    for link, moved_DR in zip(REMOTE, element_bytes * traffic.moved_KLDSR.sum(axis=(0, 3)), strict=True):
        if moved_DR.any():
            no_messages = np.zeros_like(moved_DR)
            seconds.append(_slowest(moved_DR, no_messages, hosts_RN, cluster.links.of(link)).max())
    return float(max(seconds))


def _slowest(bytes_R: np.ndarray, messages_R: np.ndarray, hosts_RN: np.ndarray, link: Link) -> np.ndarray:
    """Return the seconds of the slowest rank or node over one class of links; ranks are the last axis."""
    seconds = (bytes_R / link.bytes_per_s + link.latency_s * messages_R).max(axis=-1)
    if link.node_bytes_per_s is not None:
        seconds = np.maximum(seconds, (bytes_R @ hosts_RN).max(axis=-1) / link.node_bytes_per_s)
    return seconds
