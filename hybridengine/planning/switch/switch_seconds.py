"""Predicted seconds of a switch, from the bytes that each rank moves and the links of the cluster.

Of each bucket:

    gather    copies into messages, at memory bandwidth (each byte is read and written)
    transfer  in each step, a rank's link of each class is busy for bytes / bandwidth + latency · messages (sent and
              received), in each direction; if the ranks of a node share a link, this one for the sum of their bytes / the
              node's bandwidth
    local     copies within a rank, while the first step is under way
    spread    copies out of messages, at memory bandwidth, counted after the last step

Steps queue on the links that they use, and end when the last of these has carried them; all ranks of all domains wait for
that. Two buckets are in flight where the plan allows it: the first step of one is transferred beside what is left of the
one before, on other links (the other direction of a cable) at the same time. Kernels, stragglers and other traffic are
ignored.

Shapes: those of `reshard.cost`, with R ranks of all distinct domains, and N nodes that host different ranks; U links of
ranks and nodes, each direction by itself.
"""

from __future__ import annotations

from collections import deque
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
    """Return how often each node hosts each rank of the distinct domains (`hosts_RN`), with equal nodes merged."""
    num_nodes = len(nodes.ranks_per_node)
    hosts_RN = [
        np.bincount([nodes.node_of(rank) for rank in ranks], minlength=num_nodes)
        for repeats in domains
        for ranks in zip(*repeats, strict=True)
    ]
    return np.unique(hosts_RN, axis=1)


def predict_seconds(traffic: Traffic, hosts_RN: np.ndarray, cluster: Cluster, element_bytes: int) -> float:
    """Return the seconds from the start of the first bucket to the end of the last one, as `PlanExecutor` orders them."""
    links = _Links(_busy_seconds(traffic, hosts_RN, cluster, element_bytes))
    copies_PK = [_copy_seconds(traffic, part, hosts_RN, cluster, element_bytes) for part in range(3)]
    in_flight = deque[tuple[int, float]]()

    def finished(now: float) -> float:
        """Return when the oldest bucket is unpacked, for ranks that wait for it from now on."""
        bucket, arrival = in_flight.popleft()
        return links.carry(1, bucket, max(now, arrival)) + copies_PK[SPREAD][bucket]

    now = 0.0
    for bucket, overlaps in enumerate(traffic.overlaps_K):
        if in_flight and not overlaps:
            now = finished(now)
        begin = now + copies_PK[GATHERED][bucket]
        in_flight.append((bucket, links.carry(0, bucket, begin)))
        now = begin + copies_PK[COPIED][bucket]
        if len(in_flight) > 1:
            now = finished(now)
    while in_flight:
        now = finished(now)
    return now


class _Links:
    """Links that carry the steps of buckets, one after the other on each: U links, in both directions."""

    def __init__(self, busy_SKU: np.ndarray) -> None:
        self._busy_SKU, self._free_U = busy_SKU, np.zeros(busy_SKU.shape[-1])

    def carry(self, step: int, bucket: int, begin: float) -> float:
        """Return when a step that begins to queue on its links has ended."""
        busy_U = self._busy_SKU[step, bucket]
        (used,) = busy_U.nonzero()
        self._free_U[used] = np.maximum(self._free_U[used], begin) + busy_U[used]
        return float(self._free_U[used].max(initial=begin))


def _busy_seconds(traffic: Traffic, hosts_RN: np.ndarray, cluster: Cluster, element_bytes: int) -> np.ndarray:
    """Return the seconds for which each step of each bucket keeps links of ranks and of nodes busy, [S, K, U]."""
    num_buckets, num_steps = traffic.moved_KLDSR.shape[0], traffic.moved_KLDSR.shape[3]
    busy = [np.zeros((num_steps, num_buckets, 1))]
    for place, one in enumerate(REMOTE):
        if not traffic.messages_KLSR[:, place].any():  # the cluster may lack the link
            continue
        link = cluster.links.of(one)
        for direction in range(traffic.moved_KLDSR.shape[2]):
            moved_SKR = element_bytes * traffic.moved_KLDSR[:, place, direction].swapaxes(0, 1)
            messages_SKR = traffic.messages_KLSR[:, place].swapaxes(0, 1) * (moved_SKR > 0)
            busy.append(moved_SKR / link.bytes_per_s + link.latency_s * messages_SKR)
            if link.node_bytes_per_s is not None:
                busy.append(moved_SKR @ hosts_RN / link.node_bytes_per_s)
    return np.concatenate(busy, axis=-1)


def _copy_seconds(
    traffic: Traffic, part: int, hosts_RN: np.ndarray, cluster: Cluster, element_bytes: int
) -> list[float]:
    """Return the seconds of the slowest rank's copies in each bucket; each byte is read and written."""
    copied_KR = traffic.copied_KPR[:, part]
    return _slowest(
        2 * element_bytes * copied_KR, copied_KR > 0, hosts_RN, cluster.links.same_device
    ).tolist()


def line_rate_seconds(traffic: Traffic, hosts_RN: np.ndarray, cluster: Cluster, element_bytes: int) -> float:
    """Return the seconds of the busiest link for its bytes, a lower bound for any order of buckets."""
    seconds = [0.0]
    for link, moved_DR in zip(REMOTE, element_bytes * traffic.moved_KLDSR.sum(axis=(0, 3)), strict=True):
        if moved_DR.any():
            seconds.append(
                _slowest(moved_DR, np.zeros_like(moved_DR), hosts_RN, cluster.links.of(link)).max()
            )
    return float(max(seconds))


def _slowest(bytes_R: np.ndarray, messages_R: np.ndarray, hosts_RN: np.ndarray, link: Link) -> np.ndarray:
    """Return the seconds of the slowest rank or node on one class of links; the last axis is ranks."""
    seconds = (bytes_R / link.bytes_per_s + link.latency_s * messages_R).max(axis=-1)
    if link.node_bytes_per_s is not None:
        seconds = np.maximum(seconds, (bytes_R @ hosts_RN).max(axis=-1) / link.node_bytes_per_s)
    return seconds
