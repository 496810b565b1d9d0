"""Pools, worker groups and futures on a real Ray cluster, with workers that use real torch.distributed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from ipaddress import ip_address
from itertools import combinations, permutations, product
from pathlib import Path

import psutil
import pytest
import ray

from hybridengine.config import load_config
from hybridengine.controller.cluster import (
    NodeOffer,
    capacity_problems,
    node_key,
)
from hybridengine.controller.failures import RankFailedError
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.errors import ConfigError, ProtocolError, WorkerError
from hybridengine.topology.nodes import choose_nodes, order_pools
from hybridengine.training.launch import RunPools
from tests.full.probe_workers import ProbeWorker, batch_of


def test_roles_of_different_sizes_share_the_processes(actor: WorkerGroup, critic: WorkerGroup) -> None:
    as_actor, as_critic = actor.describe().get(), critic.describe().get()
    assert [seen["pid"] for seen in as_actor] == [seen["pid"] for seen in as_critic]
    assert len({seen["pid"] for seen in as_actor}) == 4
    for rank, seen in enumerate(as_actor):
        assert seen["world"] == (rank, 4, "gloo")
        assert seen["context"].topology == actor.topology
        assert seen["env"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "PROBE": "seen",
        }
    assert [str(seen["context"].coordinate) for seen in as_actor] == [
        "pp=0 dp=0 tp=0",
        "pp=0 dp=0 tp=1",
        "pp=1 dp=0 tp=0",
        "pp=1 dp=0 tp=1",
    ]
    assert [str(seen["context"].coordinate) for seen in as_critic] == [
        "pp=0 dp=0 tp=0",
        "pp=0 dp=0 tp=1",
        "pp=0 dp=1 tp=0",
        "pp=0 dp=1 tp=1",
    ]


def test_a_run_on_one_machine_listens_at_loopback_only(actor: WorkerGroup, warm_ray: dict[str, str]) -> None:
    actor.tp_sum(1.0).get()
    listening = {}
    own, warm = (
        psutil.Process(),
        psutil.Process(int(warm_ray["WARM_WORKERS_PROCESS"])),
    )  # the parent of the ranks
    for process in (own, *own.children(recursive=True), *warm.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    address = ip_address(one.laddr.ip)
                    listening[one.laddr] = (address.version == 6 and address.ipv4_mapped) or address
    assert len(listening) > 8  # Ray's own processes, and the ranks
    assert {place for place, address in listening.items() if not address.is_loopback} == set()


def test_collectives_run_inside_a_group_call(actor: WorkerGroup) -> None:
    assert actor.tp_sum(10.0).get() == [21.0, 21.0, 25.0, 25.0]


@pytest.mark.parametrize(
    ("role", "method", "collected"),
    [
        # Ranks whose rows are collected, with the rows of each, for 7 rows; worked out by hand from table 3.
        ("actor", "over_dp", {2: range(7)}),
        ("critic", "over_dp", {0: range(4), 2: range(4, 7)}),
        ("actor", "over_replicas", {0: range(2), 1: range(2, 4), 2: range(4, 6), 3: range(6, 7)}),
    ],
)
def test_concatenating_protocols_collect_every_row_once(
    actor: WorkerGroup, critic: WorkerGroup, role: str, method: str, collected: dict[int, range]
) -> None:
    group, batch = {"actor": actor, "critic": critic}[role], batch_of(7)
    offset = 100 if role == "critic" else 0
    result = getattr(group, method)(batch).get()
    assert result["row_ids"].tolist() == [row + offset for row in range(7)]
    assert list(result["answers"]) == [f"answer {row}!" for row in range(7)]
    assert result["ranks"].tolist() == [rank for rank, rows in collected.items() for _ in rows]
    assert batch["row_ids"].tolist() == list(range(7)), "the caller's batch was written to"


def test_dp_proto_splits_over_ranks_and_passes_other_values_on(actor: WorkerGroup) -> None:
    result = actor.over_ranks(batch_of(6), "metres", factor=3).get()
    assert result["row_ids"].tolist() == [0, 3, 6, 9, 12, 15]
    assert result["ranks"].tolist() == [0, 0, 1, 1, 2, 3]
    assert list(result["unit"]) == ["metres"] * 6


def test_listing_protocols_give_every_source_all_rows(actor: WorkerGroup, critic: WorkerGroup) -> None:
    for future, sources in (
        (actor.to_all(batch_of(3)), [0, 1, 2, 3]),
        (actor.stages(batch_of(3)), [0, 2]),
        (critic.stages(batch_of(3)), [0]),
    ):
        results = future.get()
        assert [result["ranks"].tolist() for result in results] == [[rank] * 3 for rank in sources]
        assert all(len(result["answers"]) == 3 for result in results)


def test_all_to_all_hands_out_items(actor: WorkerGroup) -> None:
    assert actor.items(["a", "b", "c", "d"]).get() == ["a@0", "b@1", "c@2", "d@3"]
    with pytest.raises(ProtocolError, match="3 items for the 4 ranks"):
        actor.items(["a", "b", "c"])
    with pytest.raises(ProtocolError, match=r"actor\.items got a str"):
        actor.items("abcd")


def test_results_without_rows_come_as_a_list_by_source(critic: WorkerGroup) -> None:
    assert critic.metrics(batch_of(5)).get() == [{"rank": 0, "rows": 3}, {"rank": 2, "rows": 2}]
    with pytest.raises(RankFailedError, match="half_a_batch returned a NoneType and is registered"):
        critic.half_a_batch(batch_of(4)).get()
    with pytest.raises(RankFailedError, match="one_row returned 1 rows for 3; return one row for each"):
        critic.one_row(batch_of(6)).get()
    with pytest.raises(
        RankFailedError, match="nested returned the column 'all' as a TensorDict; return its columns"
    ):
        critic.nested(batch_of(6)).get()


def test_a_call_returns_before_the_ranks_have_ended(actor: WorkerGroup) -> None:
    future = actor.sleep(1, 3.0)
    assert not future.done()
    assert future.missing
    assert future.get() == [None] * 4
    assert future.done()


def test_a_pool_waits_for_forgotten_calls_and_ends_its_processes(ray_cluster: int, tmp_path: Path) -> None:
    written = tmp_path / "late"
    with ResourcePool([1], timeout_s=60) as pool:
        group = WorkerGroup(pool, ProbeWorker, parallel="1-1-1")
        pid = group.describe().get()[0]["pid"]
        group.write_late(str(written), 1.0)
    assert written.read_text() == "written"
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(WorkerError, match="the pool is closed"):
        WorkerGroup(pool, ProbeWorker, role="late", parallel="1-1-1")
    assert ray.is_initialized()


def test_nodes_are_in_the_order_of_addresses_as_numbers() -> None:
    addresses = ["10.0.0.10", "10.0.0.9", "9.255.0.1"]
    assert sorted(addresses, key=lambda address: node_key(address, "")) == addresses[::-1]
    assert sorted("ba", key=lambda node_id: node_key("10.0.0.1", node_id)) == ["a", "b"]
    assert sorted([node_key("node-b", ""), node_key("::1", ""), node_key("10.0.0.1", "")])[-1][3] == "node-b"


def test_capacity_is_counted_per_node() -> None:
    offers = [NodeOffer("10.0.0.1", 64, 8), NodeOffer("10.0.0.2", 64, 4)]
    assert capacity_problems([4, 8], 1, True, offers) == []
    assert capacity_problems([8], 8, True, offers) == []
    assert capacity_problems([40, 60], 1, False, offers) == []
    (problem,) = capacity_problems([8, 8], 1, True, offers)
    assert "needs 16 ranks on 2 nodes (1 CPU and 1 GPU each)" in problem
    assert "room for [8, 4] ranks per node" in problem
    assert capacity_problems([5], 16, False, offers), "4 ranks of 16 CPUs fit on a node"
    assert capacity_problems([1, 1, 1], 1, True, offers), "three nodes are wanted"


def test_pools_choose_in_another_order_where_the_given_one_leaves_one_without_nodes() -> None:
    """Two and three pools of up to two nodes on three nodes, compared with trying every order."""
    kinds = [(1,), (2,), (3,), (2, 1), (1, 1)]
    for rooms in product(range(4), repeat=3):
        for pools in (*product(kinds, repeat=2), *product(kinds[:4], repeat=3)):
            order = order_pools(pools, rooms)
            assert sorted(order) == list(range(len(pools)))
            possible = [one for one in permutations(range(len(pools))) if _all_find_nodes(pools, one, rooms)]
            given = tuple(range(len(pools)))
            assert (tuple(order) == given) >= (given in possible)
            if tuple(order) != given:
                assert tuple(order) in possible
    assert order_pools([[2], [4]], [4, 2]) == [1, 0]


def _all_find_nodes(pools: Sequence[Sequence[int]], order: Sequence[int], rooms: Sequence[int]) -> bool:
    left = list(rooms)
    for pool in order:
        nodes = choose_nodes(pools[pool], left)
        if nodes is None:
            return False
        for node, ranks in zip(nodes, pools[pool], strict=True):
            left[node] -= ranks
    return True


def test_pools_that_do_not_fit_side_by_side_are_refused_before_they_start(ray_cluster: int) -> None:
    """Each engine alone would find room; waiting for other jobs would be in vain."""
    changes = [f"cluster.pools.engines.ranks_per_node=[{ray_cluster - 1}]", "data.batch_size=88"]
    config = load_config("configs/async-ppo.yaml", changes)
    assert config.num_ranks == ray_cluster + 1
    with pytest.raises(
        ConfigError,
        match=r"^no nodes with room are left for engine 10 of pool 'engines' with ranks_per_node=\[1\]: ",
    ):
        RunPools(config)


def test_pools_take_the_first_nodes_that_have_room() -> None:
    """All of up to 3 numbers of ranks on 4 nodes with room for 0 to 3, compared with trying every choice of nodes."""
    for rooms in product(range(4), repeat=4):
        for count in (1, 2, 3):
            for wanted in product((1, 2, 3), repeat=count):
                chosen = choose_nodes(wanted, rooms)
                possible = [
                    nodes
                    for nodes in permutations(range(4), count)
                    if all(rooms[node] >= ranks for node, ranks in zip(nodes, wanted, strict=True))
                ]
                assert (chosen is None) == (not possible)
                if chosen is None:
                    continue
                assert tuple(chosen) in possible
                largest = max(wanted)
                first = min(nodes[wanted.index(largest)] for nodes in possible)
                assert chosen[wanted.index(largest)] == first
                for one, other in combinations(range(count), 2):
                    if wanted[one] == wanted[other]:
                        assert chosen[one] < chosen[other]
