"""Costs of collectives and messages, compared with rings and neighbours laid out rank by rank."""

from __future__ import annotations

import pytest

from hybridengine.planning.costs.clusters import Axis, Fabric, load_cluster

A100 = load_cluster("configs/clusters/a100-80gb-16x8.yaml")


@pytest.mark.parametrize("stride", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_collectives_against_rings_laid_out_rank_by_rank(size: int, stride: int) -> None:
    """Every rank of a ring receives (g - 1) / g of the result from its predecessor; ranks of a node share its link."""
    cluster = A100.resized(8)
    num_ranks, num_bytes = 64, 3e9
    received = num_bytes * (size - 1) / size
    groups = [
        [first + block + stride * member for member in range(size)]
        for block in range(0, num_ranks, size * stride)
        for first in range(stride)
    ]
    inside, entering = dict.fromkeys(range(num_ranks), 0.0), dict.fromkeys(range(8), 0.0)
    for group in groups:
        for one, other in zip(group, [*group[1:], group[0]], strict=True):
            if one == other:
                continue
            if one // 8 == other // 8:
                inside[other] += received
            else:
                entering[other // 8] += received
    within, between = cluster.links.same_node, cluster.links.between_nodes
    assert between is not None and between.node_bytes_per_s is not None
    expected = max(
        max(inside.values()) / within.bytes_per_s, max(entering.values()) / between.node_bytes_per_s
    )
    found = Fabric(cluster, num_ranks).all_gather_s(num_bytes, Axis(size, stride))
    assert found == pytest.approx(expected, abs=20 * 64e-6 if size > 1 else 0.0)
    assert Fabric(cluster, num_ranks).all_reduce_s(num_bytes, Axis(size, stride)) == pytest.approx(2 * found)
    for inner in (one for one in (2, 4) if size % one == 0):
        both = Axis(inner, stride), Axis(size // inner, inner * stride)
        assert Fabric(cluster, num_ranks).all_gather_s(num_bytes, *both) == pytest.approx(found)


@pytest.mark.parametrize(
    ("size", "stride"), [(2, 1), (8, 1), (16, 1), (4, 2), (2, 4), (4, 4), (2, 8), (4, 8), (2, 16)]
)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_messages_of_a_pipeline_against_those_of_every_rank(
    size: int, stride: int, count: int, blocks: int
) -> None:
    """A rank exchanges messages with its two neighbours; a node's link carries all that its ranks send at once.

    Messages of all blocks but the last go on to the next rank, from the last rank to the first; those back likewise.
    """
    cluster, num_bytes, num_ranks = A100.resized(8), 3e9, 64
    within, between = cluster.links.same_node, cluster.links.between_nodes
    assert between is not None and between.node_bytes_per_s is not None
    node_bytes_per_s = between.node_bytes_per_s

    def message_s(rank: int, other: int) -> float:
        if rank // 8 == other // 8:
            return num_bytes / within.bytes_per_s
        leaving = [
            one for one in range(rank // 8 * 8, rank // 8 * 8 + 8) if _beside(one, other - rank, size, stride)
        ]
        crossing = [one for one in leaving if (one + other - rank) // 8 != one // 8]
        return num_bytes * len(crossing) / node_bytes_per_s

    slowest = 0.0
    for rank in range(num_ranks):
        neighbours = [
            (rank + step, blocks)
            if _beside(rank, step, size, stride)
            else (rank - (size - 1) * step, blocks - 1)
            for step in (stride, -stride)
        ]
        seconds = sorted((number * message_s(rank, other) for other, number in neighbours), reverse=True)
        slowest = max(slowest, sum(seconds[:count]))
    found = Fabric(cluster, num_ranks).sends_s(num_bytes, Axis(size, stride), count, blocks)
    assert found == pytest.approx(slowest, abs=1e-3, rel=0.02)


def _beside(rank: int, step: int, size: int, stride: int) -> bool:
    """Return True if the group of a rank has another rank in that direction."""
    place = rank // stride % size
    return 0 <= place + step // stride < size
