"""Errors that callers see of failures, hangs, dead ranks, impossible calls, groups and pools, on a real Ray cluster."""

from __future__ import annotations

import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import torch
import torch.distributed as dist

from hybridengine.controller.calls import Future
from hybridengine.controller.failures import Outcome, RankFailedError, failure_of
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.errors import ConfigError, ProtocolError, TopologyError, TransferError, WorkerTimeoutError
from hybridengine.weights.transport import PeerError
from tests.full.probe_workers import BrokenWorker, ClashingWorker, ProbeWorker, SilentWorker, batch_of


def test_a_worker_exception_says_where_and_why(actor: WorkerGroup) -> None:
    with pytest.raises(RankFailedError) as caught:
        actor.fail(2).get()
    error = caught.value
    assert (error.failure.role, error.failure.method, error.failure.rank) == ("actor", "fail", 2)
    assert error.failure.place.startswith("pp=1 dp=0 tp=0, node ")
    assert str(error).startswith("actor.fail failed on rank 2 (pp=1 dp=0 tp=0, node ")
    assert "ValueError: bad luck on 2" in str(error)
    assert "in fail\n" in str(error), "the rank's traceback is missing"
    assert isinstance(error.__cause__, ValueError)
    assert str(error.failure.original) == "bad luck on 2"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.failure.rank) == (str(error), 2)
    assert actor.items(["a"] * 4).get() == ["a@0", "a@1", "a@2", "a@3"], "the group lives on"


def test_an_exception_that_cannot_be_pickled_arrives_as_text(actor: WorkerGroup) -> None:
    with pytest.raises(RankFailedError, match="UnpicklableError: 1 and 2") as caught:
        actor.fail(3, picklable=False).get()
    assert caught.value.failure.original is None
    assert caught.value.failure.rank == 3


def test_sys_exit_inside_a_call_is_a_failure_of_the_call(actor: WorkerGroup) -> None:
    with pytest.raises(RankFailedError, match=r"actor\.leave failed on rank 1 .*: SystemExit: no more"):
        actor.leave(1).get()
    assert len(actor.describe().get()) == 4, "the process lives on"


def test_a_failure_that_nobody_fetched_is_raised_by_the_next_call(
    actor: WorkerGroup, critic: WorkerGroup
) -> None:
    forgotten = actor.fail(1)
    while forgotten.missing:
        forgotten.done()
        time.sleep(0.01)
    with pytest.raises(RankFailedError, match=r"actor\.fail failed on rank 1"):
        critic.describe()
    assert len(critic.describe().get()) == 4, "a failure is raised once"


def test_a_hang_ends_in_a_timeout_that_names_operation_and_ranks(
    actor: WorkerGroup, critic: WorkerGroup
) -> None:
    hanging = actor.sleep(3, 6.0)
    with pytest.raises(
        WorkerTimeoutError, match=r"actor\.sleep did not end within 2 s: 1 of 4 ranks"
    ) as caught:
        hanging.get(timeout_s=2.0)
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


@pytest.mark.usefixtures("actor")
def test_wrong_groups_are_refused_before_anything_starts(ray_cluster: int, pool: ResourcePool) -> None:
    fresh = ResourcePool([4])
    with pytest.raises(ConfigError, match="2·2·2 = 8 ranks, and the pool has 4"):
        WorkerGroup(fresh, ProbeWorker, parallel="2-2-2")
    with pytest.raises(TopologyError, match="1·3 = 3 ranks do not divide the 4 ranks of training 4-1-1"):
        WorkerGroup(fresh, ProbeWorker, parallel="4-1-1", generate="1-3")
    with pytest.raises(ConfigError, match="SilentWorker has no registered method"):
        WorkerGroup(fresh, SilentWorker, parallel="2-2-1")
    with pytest.raises(ConfigError, match=r"ClashingWorker\.topology has the name of an attribute"):
        WorkerGroup(fresh, ClashingWorker, parallel="2-2-1")
    with pytest.raises(ConfigError, match=r"'nowhere\.Worker' cannot be imported"):
        WorkerGroup(fresh, "nowhere.Worker", parallel="2-2-1")
    assert not fresh.started
    with pytest.raises(ConfigError, match="role 'actor' exists in this pool"):
        WorkerGroup(pool, ProbeWorker, role="actor", parallel="2-2-1")


def test_more_ranks_than_the_cluster_has_are_refused(ray_cluster: int) -> None:
    for ranks_per_node in ([ray_cluster + 1], [1, 1]):
        pool = ResourcePool(ranks_per_node)
        begin = time.monotonic()
        with pytest.raises(
            ConfigError, match=f"with {ray_cluster} CPUs and 0 GPUs; choose smaller parallel sizes"
        ):
            pool.start()
        assert time.monotonic() - begin < 30
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
        assert time.monotonic() - begin < 30, "a failure waits for nobody"
        begin = time.monotonic()
        with pytest.raises(RankFailedError, match=r"probe\.die_before_collective died on rank 1") as caught:
            group.die_before_collective(1).get()
        assert time.monotonic() - begin < 45
        assert caught.value.failure.died
        assert caught.value.failure.place.startswith("pp=0 dp=0 tp=1, node ")
        begin = time.monotonic()
        pool.close()
        assert time.monotonic() - begin < 45


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
    switch = TransferError("bucket 3 of 8: a peer is missing")  # NCCL's own text does not name the library
    switch.__cause__ = PeerError((1,), "unhandled system error")
    assert not failure_of(0, switch).in_collective
    switch.__cause__.__cause__ = dist.DistBackendError("unhandled system error")
    assert failure_of(0, switch).in_collective
    ray.get(later.remote(Outcome(0.0, 0.0), 0.0))  # the process that runs it next has started
    arriving = {ray.put(Outcome(0.0, 0.0, echo)): [0], later.remote(Outcome(0.0, 0.0, cause), 0.5): [1]}
    with pytest.raises(
        RankFailedError, match=r"probe\.step failed on rank 1 .*the cause\nalso failed: rank 0 "
    ):
        Future(ResourcePool([2]), "probe", "step", arriving, places=["here", "there"], timeout_s=10).wait()


def test_a_later_wait_sees_what_failed_first_and_each_call_has_its_own_limit(ray_cluster: int) -> None:
    with ResourcePool([2], timeout_s=60) as pool:
        group = WorkerGroup(pool, ProbeWorker, parallel="1-2-1", timeout_s=5)
        for _ in range(3):  # 6 s of work, each call within its limit
            group.sleep(0, 2.0)
        assert len(group.describe().get()) == 2
        begin = time.monotonic()
        group.fail_before_collective(1)  # rank 0 hangs in it and never reaches the next call
        with pytest.raises(RankFailedError, match=r"probe\.fail_before_collective failed on rank 1"):
            group.describe().get(
                timeout_s=30
            )  # the next call raises it, at once if it is known by then, or else when it waits
        assert time.monotonic() - begin < 5, "nobody waits for the rank that hangs"
        pool.close()  # nobody waits for that call
    with ResourcePool([3], timeout_s=60) as pool:
        group = WorkerGroup(pool, ProbeWorker, parallel="1-3-1", timeout_s=3)
        group.hang()
        with pytest.raises(WorkerTimeoutError, match=r"probe\.hang did not end within 3 s: 3 of 3") as caught:
            group.describe().get()
        pool.close()
    stopped, elsewhere, waiting = str(caught.value).splitlines()[1:]
    assert re.fullmatch(
        r"  rank 2 \(pp=0 dp=0 tp=2, node \S+\): says nothing: its process is stopped, .*", stopped
    )
    assert re.fullmatch(
        r"  rank 0 \(.*\): in all_reduce \(torch/distributed/distributed_c10d\.py:\d+\)", waiting
    )
    assert re.fullmatch(r"  rank 1 \(.*\): in hang \(tests/full/probe_workers\.py:\d+\)", elsewhere)
    with ResourcePool([2], timeout_s=60) as pool:
        group = WorkerGroup(pool, ProbeWorker, parallel="1-2-1")
        group.die_before_collective(1)
        with pytest.raises(RankFailedError, match=r"probe\.die_before_collective died on rank 1"):
            group.describe().get()
        pool.close()


SLEEPER = """
import argparse, sys, tempfile, time, ray
from hybridengine.cli import main as command_line
from hybridengine.controller.cluster import start_ray
def waits(options):
    start_ray(num_cpus=1, num_gpus=0)
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        print("there", flush=True)
        try:
            ray.get(ray.remote(lambda: time.sleep(60)).remote())
        finally:
            time.sleep(4)
parser = argparse.ArgumentParser()
parser.set_defaults(run=waits)
command_line._parser = lambda: parser
sys.exit(command_line.main([]))
"""
"""A program that runs the command line with a command that waits for Ray."""


def test_a_command_that_is_told_to_terminate_tidies_up(tmp_path: Path) -> None:
    """A scheduler ends a job this way. Ray has its own handlers; one aborts a process that takes longer than 3 s."""
    command = [sys.executable, "-c", SLEEPER, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())
