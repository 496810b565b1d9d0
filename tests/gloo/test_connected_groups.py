"""Process groups are connected when they are made, before any step or switch uses them."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch.distributed as dist

from hybridengine.backends.megatron.groups import build_groups, initialize_globals
from hybridengine.errors import TransferError
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights import process_groups
from hybridengine.weights.process_groups import ProcessGroups, join_group
from tests.gloo.ranks import RankLauncher

Ranks = tuple[int, ...]


def sums_of(rank: int, sizes: str) -> dict[str, Counter[Ranks]]:
    """Return the number of sums over each group while groups of a model, a transport and a link are made."""
    initialize_globals(1)
    registry, grid = ProcessGroups(), Grid(TrainSizes.parse(sizes))
    seen = dict[str, Counter[Ranks]]()
    all_reduce = dist.all_reduce

    def counted(tensor, group):  # type: ignore[no-untyped-def]
        counts[tuple(dist.get_process_group_ranks(group))] += 1
        assert tensor.numel() == 1
        return all_reduce(tensor, group=group)

    with mock.patch.object(process_groups.dist, "all_reduce", counted):
        counts = seen["model"] = Counter()
        build_groups(grid, registry)
        counts = seen["second role"] = Counter()
        build_groups(grid, registry)
        counts = seen["transport"] = Counter()
        registry.new(grid.groups("pp", "tp"))
        counts = seen["link"] = Counter()
        join_group(dist.distributed_c10d._get_default_store(), "link", range(grid.num_ranks), rank, 60)
    return seen


@pytest.mark.parametrize("sizes", ["2-2-1", "1-2-2", "4-1-1"])
def test_each_group_is_summed_over_once(sizes: str, run_ranks: RankLauncher) -> None:
    grid = Grid(TrainSizes.parse(sizes))
    for rank, seen in enumerate(run_ranks(4, sums_of, sizes)):
        (own,) = (ranks for ranks in grid.groups("pp", "tp") if rank in ranks)
        axes = [("pp",), ("tp",), ("dp",), ("pp", "tp"), ("dp", "tp"), ("pp", "dp", "tp")]
        groups = {ranks for group in axes for ranks in grid.groups(*group) if rank in ranks}
        ends = {(stages[0], stages[-1]) for stages in grid.groups("pp")}
        groups |= {one for one in ends if rank in one and len(set(one)) > 1}
        assert seen["model"] == Counter(ranks for ranks in groups if len(ranks) > 1)
        assert seen["second role"] == Counter()  # roles share groups
        assert seen["transport"] == Counter([own])
        assert seen["link"] == Counter([(0, 1, 2, 3)])


def connect_without_the_others(rank: int) -> str:
    group = ProcessGroups(timeout_s=2.0).of(((0, 1),))
    if rank == 1:
        return ""
    with pytest.raises(TransferError) as caught:
        process_groups.connect(group)
    return str(caught.value)


def test_a_rank_that_does_not_come_is_an_error_in_time(run_ranks: RankLauncher) -> None:
    message, _ = run_ranks(2, connect_without_the_others)
    assert message.startswith("not all ranks of [0, 1] have come to connect their group: ")
