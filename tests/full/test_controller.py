"""Pools, worker groups and futures on a real Ray cluster, with workers that use real torch.distributed."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from ray import cloudpickle
from tensordict import NonTensorStack, TensorDict

from hybridengine.controller.cluster import NodeOffer, capacity_problems, node_key, order_bundles
from hybridengine.controller.context import RankContext
from hybridengine.controller.failures import Outcome, RankFailedError, failure_of
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.waiting import Operation
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.errors import ConfigError, ProtocolError, TopologyError, WorkerError, WorkerTimeoutError
from hybridengine.protocols import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    PROTO_3D,
    PROTO_3D_ALL_MICRO_DP,
    PROTO_3D_PP_ONLY,
    register,
)

pytestmark = pytest.mark.full

# Rank processes do not have this folder on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class UnpicklableError(Exception):
    def __init__(self, one: int, two: int) -> None:  # pickle calls it with one argument
        super().__init__(f"{one} and {two}")


class ProbeWorker:
    """Reports what it got; `offset` is added to the ids of rows that pass through."""

    def __init__(self, context: RankContext, offset: int = 0) -> None:
        self.context = context
        self.offset = offset
        self.tp_group = None
        for ranks in context.topology.grid.groups("tp"):
            group = dist.new_group(list(ranks))
            if context.rank in ranks:
                self.tp_group = group

    @register(ONE_TO_ALL)
    def describe(self) -> dict[str, Any]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "PROBE")
        return {
            "context": self.context,
            "pid": os.getpid(),
            "world": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
            "env": {name: os.environ.get(name) for name in names},
        }

    @register(ONE_TO_ALL)
    def tp_sum(self, value: float) -> float:
        total = torch.tensor(float(self.context.rank) + value)
        dist.all_reduce(total, group=self.tp_group)
        return total.item()

    def _echo(self, batch: TensorDict) -> TensorDict:
        seen = TensorDict(
            {
                "row_ids": batch["row_ids"] + self.offset,
                "answers": NonTensorStack(*[f"{text}!" for text in batch["answers"]]),
                "ranks": torch.full((len(batch),), self.context.rank),
            },
            batch_size=batch.batch_size,
        )
        batch["row_ids"].zero_()  # a worker may write into what it was given
        return seen

    @register(ONE_TO_ALL)
    def to_all(self, batch: TensorDict) -> TensorDict:
        return self._echo(batch)

    @register(PROTO_3D)
    def over_dp(self, batch: TensorDict) -> TensorDict:
        return self._echo(batch)

    @register(PROTO_3D_ALL_MICRO_DP)
    def over_replicas(self, batch: TensorDict) -> TensorDict:
        return self._echo(batch)

    @register(PROTO_3D_PP_ONLY)
    def stages(self, batch: TensorDict) -> TensorDict:
        return self._echo(batch)

    @register(DP_PROTO)
    def over_ranks(self, batch: TensorDict, unit: str, *, factor: int) -> TensorDict:
        seen = self._echo(batch)
        seen["row_ids"] *= factor
        seen["unit"] = NonTensorStack(*[unit] * len(batch))
        return seen

    @register(PROTO_3D)
    def metrics(self, batch: TensorDict) -> dict[str, int]:
        return {"rank": self.context.rank, "rows": len(batch)}

    @register(PROTO_3D)
    def half_a_batch(self, batch: TensorDict) -> TensorDict | None:
        return batch if self.context.coordinate.dp_rank == 0 else None

    @register(ALL_TO_ALL)
    def items(self, item: str) -> str:
        return f"{item}@{self.context.rank}"

    @register(ONE_TO_ALL)
    def fail(self, rank: int, picklable: bool = True) -> None:
        if self.context.rank == rank:
            raise ValueError(f"bad luck on {rank}") if picklable else UnpicklableError(1, 2)

    @register(ONE_TO_ALL)
    def sleep(self, rank: int, seconds: float) -> None:
        if self.context.rank == rank:
            time.sleep(seconds)

    @register(ONE_TO_ALL)
    def fail_before_collective(self, rank: int) -> None:
        self.fail(rank)
        dist.all_reduce(torch.ones(1))

    @register(ONE_TO_ALL)
    def die_before_collective(self, rank: int) -> None:
        if self.context.rank == rank:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    @register(ONE_TO_ALL)
    def write_late(self, path: str, seconds: float) -> None:
        time.sleep(seconds)
        Path(path).write_text("written")


class SilentWorker:
    """Has nothing registered."""


class ClashingWorker:
    """Its method would hide an attribute of the group."""

    @register(ONE_TO_ALL)
    def protocol(self) -> None: ...


class BrokenWorker:
    """Cannot be made on rank 2."""

    def __init__(self, context: RankContext) -> None:
        if context.rank == 2:
            raise ConfigError("heads=3 is odd; choose 2")

    @register(ONE_TO_ALL)
    def nothing(self) -> None: ...


def batch_of(num_rows: int) -> TensorDict:
    answers = NonTensorStack(*[f"answer {row}" for row in range(num_rows)])
    return TensorDict({"row_ids": torch.arange(num_rows), "answers": answers}, batch_size=[num_rows])


@pytest.fixture(scope="module")
def pool(ray_cluster: int) -> Iterator[ResourcePool]:
    with ResourcePool([4], env={"PROBE": "seen"}, timeout_s=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def actor(pool: ResourcePool) -> WorkerGroup:
    return WorkerGroup(pool, ProbeWorker, role="actor", parallel="2-2-1", generate="1-1")


@pytest.fixture(scope="module")
def critic(pool: ResourcePool) -> WorkerGroup:
    return WorkerGroup(pool, ProbeWorker, role="critic", parallel="1-2-2", config={"offset": 100})


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


def test_collectives_run_inside_a_group_call(actor: WorkerGroup) -> None:
    assert actor.tp_sum(10.0).get() == [21.0, 21.0, 25.0, 25.0]


@pytest.mark.parametrize(
    ("role", "method", "collected"),
    [
        # ranks whose rows come back, with the rows of each, for 7 rows; worked out by hand from table 3
        ("actor", "over_dp", {2: range(7)}),
        ("critic", "over_dp", {0: range(4), 2: range(4, 7)}),
        ("actor", "over_replicas", {0: range(2), 1: range(2, 4), 2: range(4, 6), 3: range(6, 7)}),
    ],
)
def test_concatenating_protocols_collect_every_row_once(
    request: pytest.FixtureRequest, role: str, method: str, collected: dict[int, range]
) -> None:
    group, batch = request.getfixturevalue(role), batch_of(7)
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
    with pytest.raises(ProtocolError, match="TensorDict on 1 of 2 source ranks"):
        critic.half_a_batch(batch_of(4)).get()


def test_a_future_is_an_argument_of_another_group(actor: WorkerGroup, critic: WorkerGroup) -> None:
    rollout = actor.over_replicas(batch_of(5))
    values = critic.over_dp(rollout)
    assert values.get()["row_ids"].tolist() == [100, 101, 102, 103, 104]
    assert list(values.get()["answers"]) == [f"answer {row}!!" for row in range(5)]
    with pytest.raises(TypeError, match="cannot be sent to a rank inside another value"):
        critic.tp_sum({"nested": rollout})


def test_bytes_through_the_controller_are_counted(pool: ResourcePool, critic: WorkerGroup) -> None:
    sent, received = pool.sent_bytes, pool.received_bytes
    batch = batch_of(4).exclude("answers")
    batch["answers"] = NonTensorStack("a", "b", "c", "d")
    critic.over_dp(batch).get()
    assert pool.sent_bytes - sent == 2 * (4 * 8 + 4)  # each half goes to the two ranks of a DP group
    assert pool.received_bytes - received == 4 * 8 + 4 * 2 + 4 * 8


def test_a_call_returns_before_the_ranks_have_ended(actor: WorkerGroup) -> None:
    begin = time.monotonic()
    future = actor.sleep(1, 1.0)
    assert time.monotonic() - begin < 0.5
    assert not future.done()
    assert future.operation.missing
    assert future.get() == [None] * 4
    assert future.seconds >= 1.0
    assert future.done()


def test_a_worker_exception_says_where_and_why(actor: WorkerGroup) -> None:
    with pytest.raises(RankFailedError) as caught:
        actor.fail(2).get()
    error = caught.value
    assert (error.role, error.method, error.rank) == ("actor", "fail", 2)
    assert error.place.startswith("pp=1 dp=0 tp=0, node ")
    assert str(error).startswith("actor.fail failed on rank 2 (pp=1 dp=0 tp=0, node ")
    assert "ValueError: bad luck on 2" in str(error)
    assert "in fail\n" in str(error), "the rank's traceback is missing"
    assert isinstance(error.__cause__, ValueError)
    assert str(error.original) == "bad luck on 2"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank) == (str(error), 2)
    assert actor.items(["a"] * 4).get() == ["a@0", "a@1", "a@2", "a@3"], "the group lives on"


def test_an_exception_that_cannot_be_pickled_arrives_as_text(actor: WorkerGroup) -> None:
    with pytest.raises(RankFailedError, match="UnpicklableError: 1 and 2") as caught:
        actor.fail(3, picklable=False).get()
    assert caught.value.original is None
    assert caught.value.rank == 3


def test_a_failure_that_nobody_fetched_is_raised_by_the_next_call(
    actor: WorkerGroup, critic: WorkerGroup
) -> None:
    forgotten = actor.fail(1)
    while forgotten.operation.missing:
        forgotten.done()
        time.sleep(0.01)
    with pytest.raises(RankFailedError, match=r"actor\.fail failed on rank 1"):
        critic.describe()
    assert len(critic.describe().get()) == 4, "a failure is raised once"


def test_a_hang_ends_in_a_timeout_that_names_operation_and_ranks(
    actor: WorkerGroup, critic: WorkerGroup
) -> None:
    hanging = actor.sleep(3, 4.0)
    with pytest.raises(
        WorkerTimeoutError, match=r"actor\.sleep did not end within 1 s: 1 of 4 ranks"
    ) as caught:
        hanging.get(timeout_s=1.0)
    assert "  rank 3 (pp=1 dp=0 tp=1, node " in str(caught.value)
    assert "rank 2" not in str(caught.value)
    assert "still in" not in str(caught.value), "the rank is in this very call"
    behind = critic.describe()
    with pytest.raises(WorkerTimeoutError, match=r"critic\.describe") as caught:
        behind.get(timeout_s=0.5)
    assert "still in actor.sleep" in str(caught.value)
    assert hanging.get() == [None] * 4, "a call that timed out can be waited for again"
    assert len(behind.get()) == 4


def test_wrong_calls_are_refused_in_the_controller(actor: WorkerGroup, critic: WorkerGroup) -> None:
    with pytest.raises(TypeError, match=r"actor\.tp_sum.*missing a required argument: 'value'"):
        actor.tp_sum()
    with pytest.raises(AttributeError, match="did you mean over_dp"):
        actor.over_pd(batch_of(4))
    with pytest.raises(ProtocolError, match="3 rows cannot be split over 4 generation replicas"):
        actor.over_replicas(batch_of(3))
    with pytest.raises(ProtocolError, match="needs generation sizes"):
        critic.over_replicas(batch_of(4))
    with pytest.raises(ProtocolError, match="2 and 4 rows"):
        actor.over_ranks(batch_of(4), batch_of(2), factor=1)


def test_wrong_groups_are_refused_before_anything_starts(ray_cluster: int, pool: ResourcePool) -> None:
    fresh = ResourcePool([4])
    with pytest.raises(ConfigError, match="2·2·2 = 8 ranks, and the pool has 4"):
        WorkerGroup(fresh, ProbeWorker, parallel="2-2-2")
    with pytest.raises(TopologyError, match="1·3 = 3 ranks do not divide the 4 ranks of training 4-1-1"):
        WorkerGroup(fresh, ProbeWorker, parallel="4-1-1", generate="1-3")
    with pytest.raises(ConfigError, match="SilentWorker has no registered method"):
        WorkerGroup(fresh, SilentWorker, parallel="2-2-1")
    with pytest.raises(ConfigError, match=r"ClashingWorker\.protocol has the name of an attribute"):
        WorkerGroup(fresh, ClashingWorker, parallel="2-2-1")
    with pytest.raises(WorkerError, match=r"'nowhere\.Worker' cannot be imported"):
        WorkerGroup(fresh, "nowhere.Worker", parallel="2-2-1")
    assert not fresh.started
    with pytest.raises(ConfigError, match="role 'actor' exists in this pool"):
        WorkerGroup(pool, ProbeWorker, role="actor", parallel="2-2-1")


def test_more_ranks_than_the_cluster_has_are_refused(ray_cluster: int) -> None:
    for ranks_per_node in ([ray_cluster + 1], [1, 1]):
        pool = ResourcePool(ranks_per_node)
        begin = time.monotonic()
        with pytest.raises(ConfigError, match=r"with 8 CPUs and 0 GPUs; choose smaller parallel sizes"):
            pool.start()
        assert time.monotonic() - begin < 5
        assert not pool.started
    with pytest.raises(ConfigError, match="and 1 GPU each"):
        ResourcePool(gpus_per_node=[1]).start()
    with pytest.raises(ConfigError, match="exactly one"):
        ResourcePool([1], gpus_per_node=[1])


def test_a_failing_constructor_names_its_rank(pool: ResourcePool) -> None:
    with pytest.raises(RankFailedError, match=r"broken\.__init__ failed on rank 2.*heads=3 is odd") as caught:
        WorkerGroup(pool, BrokenWorker, parallel="2-2-1")
    assert isinstance(caught.value.__cause__, ConfigError)


def test_a_failed_or_dead_rank_is_reported_while_its_peers_hang(ray_cluster: int) -> None:
    pool = ResourcePool([2], timeout_s=60)
    with pool:
        group = WorkerGroup(pool, ProbeWorker, parallel="1-2-1")
        begin = time.monotonic()
        with pytest.raises(RankFailedError, match=r"probe\.fail_before_collective failed on rank 1"):
            group.fail_before_collective(1).get()
        assert time.monotonic() - begin < 3, "a failure waits for nobody"
        begin = time.monotonic()
        with pytest.raises(RankFailedError, match=r"probe\.die_before_collective died on rank 1") as caught:
            group.die_before_collective(1).get()
        assert time.monotonic() - begin < 15
        assert caught.value.failure.died
        assert caught.value.place.startswith("pp=0 dp=0 tp=1, node ")
        begin = time.monotonic()
        pool.close()
        assert time.monotonic() - begin < 15


def test_the_cause_is_blamed_and_not_its_echo_in_a_collective(ray_cluster: int) -> None:
    @ray.remote(num_cpus=0)
    def later(outcome: Outcome, seconds: float) -> Outcome:
        time.sleep(seconds)
        return outcome

    with pytest.raises(ValueError, match="process group") as caught:
        dist.all_reduce(torch.ones(1))
    echo = failure_of(0, caught.value)
    cause = failure_of(1, ValueError("the cause"))
    assert (echo.in_collective, cause.in_collective) == (True, False)
    ray.get(later.remote(Outcome(1, 0.0), 0.0))  # the process that runs it next has started
    arriving = {0: ray.put(Outcome(0, 0.0, echo)), 1: later.remote(Outcome(1, 0.0, cause), 0.5)}
    with pytest.raises(
        RankFailedError, match=r"probe\.step failed on rank 1 .*the cause\nalso failed: rank 0 "
    ):
        Operation("probe", "step", arriving, ["here", "there"]).wait(timeout_s=10)


def test_a_pool_waits_for_forgotten_calls_and_ends_its_processes(ray_cluster: int, tmp_path: Path) -> None:
    written = tmp_path / "late"
    with ResourcePool([1], timeout_s=60) as pool:
        group = WorkerGroup(pool, ProbeWorker, parallel="1-1-1")
        pid = group.describe().get()[0]["pid"]
        group.write_late(str(written), 1.0)
    assert written.read_text() == "written"
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(WorkerError, match="the pool is closed"):
        WorkerGroup(pool, ProbeWorker, role="late", parallel="1-1-1")
    assert ray.is_initialized()


def test_ranks_follow_addresses_as_numbers_and_not_bundles() -> None:
    addresses = ["10.0.0.10", "10.0.0.9", "9.255.0.1"]
    keys = [node_key(address, f"id{index}") for index, address in enumerate(addresses)]
    assert order_bundles([8, 8, 8], keys) == [2, 1, 0]
    assert order_bundles([8, 4, 8], keys) == [2, 1, 0]
    assert order_bundles([4, 8, 8], keys) == [0, 2, 1], "each position keeps its number of ranks"
    twins = [node_key("10.0.0.1", node_id) for node_id in ("b", "a")]
    assert order_bundles([2, 2], twins) == [1, 0]
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
