"""Predicted seconds of a switch, from the bytes that each rank moves in each bucket and the links of the cluster.

The model, for each bucket in turn:

    gather    copies into messages, at memory bandwidth (each byte is read and written)
    transfer  in each step, links of different classes, and both directions of a link, work at the same time; a rank
              takes max(received, sent) / bandwidth + latency · messages on its busiest class; if the ranks of a node
              share a link, the node takes the sum of its ranks' bytes divided by the node's bandwidth
    spread    copies out of messages and within the rank, at memory bandwidth

Every part ends when its slowest rank ends; all domains are in the same bucket at the same time. The spread of a bucket
overlaps with the transfer of the next one if the plan allows both in flight. The result is a prediction from the figures
of the links: kernels, stragglers and other traffic are ignored.

Shapes: those of `reshard.cost`, with R ranks of all distinct domains, and N nodes that host different ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridengine.planning.costs.clusters import Cluster, Link
from hybridengine.reshard.cost import COPIED, GATHERED, REMOTE, SPREAD, Traffic
from hybridengine.topology.grid import Groups
from hybridengine.topology.links import NodeMap


def joined(domains: Sequence[Traffic]) -> Traffic:
    """Return the joint traffic of several domains, which are in the same bucket at the same time."""
    num_buckets = max(len(domain.overlaps_K) for domain in domains)

    def padded(values: np.ndarray, filler: int = 0) -> np.ndarray:
        missing = [(0, num_buckets - len(values)), *[(0, 0)] * (values.ndim - 1)]
        return np.pad(values, missing, constant_values=filler)

    return Traffic(
        np.concatenate([padded(domain.moved_KLDSR) for domain in domains], axis=-1),
        np.concatenate([padded(domain.messages_KLSR) for domain in domains], axis=-1),
        np.concatenate([padded(domain.copied_KPR) for domain in domains], axis=-1),
        np.all([padded(domain.overlaps_K, True) for domain in domains], axis=0),
    )


def hosted_ranks(domains: Sequence[Groups], nodes: NodeMap) -> np.ndarray:
    """Return how often each node hosts each rank of the distinct domains (`hosts_RN`), with equal nodes merged.

    Args:
        domains: ranks of all equivalent domains, for each distinct domain.
    """
    num_nodes = len(nodes.ranks_per_node)
    hosts_RN = [
        np.bincount([nodes.node_of(rank) for rank in ranks], minlength=num_nodes)
        for repeats in domains
        for ranks in zip(*repeats, strict=True)
    ]
    return np.unique(hosts_RN, axis=1)


def predict_seconds(traffic: Traffic, hosts_RN: np.ndarray, cluster: Cluster, element_bytes: int) -> float:
    """Return the seconds from the start of the first bucket to the end of the last one."""
    moved_KLDSR = element_bytes * traffic.moved_KLDSR
    transfer_KS = np.zeros_like(moved_KLDSR[:, 0, 0, :, 0], dtype=float)
    for place, link in enumerate(REMOTE):
        messages_KSR = traffic.messages_KLSR[:, place]
        if messages_KSR.any():
            for direction in range(2):
                moved_KSR = moved_KLDSR[:, place, direction]
                seconds_KS = _slowest(moved_KSR, messages_KSR, hosts_RN, cluster.links.of(link))
                transfer_KS = np.maximum(transfer_KS, seconds_KS)

    def copy_s(copied_KR: np.ndarray) -> list[float]:
        read_and_written_KR = 2 * element_bytes * copied_KR
        return _slowest(read_and_written_KR, copied_KR > 0, hosts_RN, cluster.links.same_device).tolist()

    gather_K = copy_s(traffic.copied_KPR[:, GATHERED])
    spread_K = copy_s(traffic.copied_KPR[:, SPREAD] + traffic.copied_KPR[:, COPIED])
    total = pending = 0.0  # seconds of the previous bucket's spread
    for gather, transfer, spread, overlaps in zip(
        gather_K, transfer_KS.sum(axis=1).tolist(), spread_K, traffic.overlaps_K, strict=True
    ):
        total += gather + (max(transfer, pending) if overlaps else transfer + pending)
        pending = spread
    return total + pending


def line_rate_seconds(traffic: Traffic, hosts_RN: np.ndarray, cluster: Cluster, element_bytes: int) -> float:
    """Return the seconds of the busiest link for its bytes, a lower bound for any order of buckets."""
    seconds = [0.0]
    for link, moved_DR in zip(REMOTE, element_bytes * traffic.moved_KLDSR.sum(axis=(0, 3)), strict=True):
        if moved_DR.any():
            no_messages = np.zeros_like(moved_DR)
            seconds.append(_slowest(moved_DR, no_messages, hosts_RN, cluster.links.of(link)).max())
    return float(max(seconds))


def _slowest(bytes_R: np.ndarray, messages_R: np.ndarray, hosts_RN: np.ndarray, link: Link) -> np.ndarray:
    """Return the seconds of the slowest rank or node on one class of links; the last axis is ranks."""
    seconds = (bytes_R / link.bytes_per_s + link.latency_s * messages_R).max(axis=-1)
    if link.node_bytes_per_s is not None:
        seconds = np.maximum(seconds, (bytes_R @ hosts_RN).max(axis=-1) / link.node_bytes_per_s)
    return seconds
