"""A real SLURM carries out what `hybridengine launch slurm` writes, and starts it again when a node dies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machines.hosts import Host, Network, joined_hosts
from tests.machines.launching import (
    last_checkpoint,
    launch_environment,
    processes_of_ray,
    trained_steps,
    write_run,
)
from tests.machines.ray_nodes import warm_folder
from tests.machines.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.timeout(1500)
NODES = ("node-a", "node-b", "node-c")
LIMIT_S = 700.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def network(shared: Path, warm_ray: dict[str, str]) -> Iterator[Network]:
    with joined_hosts(["control", *NODES], shared=[shared, warm_folder(warm_ray)]) as network:
        yield network


@pytest.fixture(scope="module")
def slurm(network: Network, shared: Path) -> SlurmCluster:
    return SlurmCluster(network.hosts, shared)


def submit(slurm: SlurmCluster, shared: Path, config: Path, warm_ray: dict[str, str], *options: str) -> str:
    """Submit a run as a job, and return its number."""
    said = slurm.say(
        *(sys.executable, "-m", "hybridengine.cli.main", "launch", "slurm", config, "--submit"),
        *("--time", "60", "--start-limit", "400", "--sbatch-option", f"output={shared}/%x-%j.log"),
        *options,
        env=launch_environment(warm_ray),
    )
    assert "Submitted batch job" in said, said
    return said.split()[-1]


def ended(slurm: SlurmCluster, job: str) -> bool:
    return slurm.state(job).get("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")


def logs(shared: Path, name: str) -> str:
    """Return what a run's jobs and nodes have printed."""
    files = [*shared.glob(f"{name}-*.log"), *sorted((shared / "runs" / name).glob("launch/*/*.log"))]
    return "\n".join(f"== {file}\n{file.read_text()[-4000:]}" for file in files)


def test_a_job_trains_on_two_nodes_and_leaves_nothing(
    slurm: SlurmCluster, shared: Path, warm_ray: dict[str, str]
):
    job = submit(slurm, shared, write_run(shared, "first", steps=2), warm_ray)
    slurm.wait_for(lambda: ended(slurm, job), LIMIT_S)
    state = slurm.state(job)
    assert (state["JobState"], state["NumNodes"], state["Restarts"]) == ("COMPLETED", "2", "0"), logs(
        shared, "first"
    )
    assert trained_steps(shared, "first")[-1] == 2
    folder = shared / "runs" / "first" / "launch" / f"{job}.0"
    assert {"node-a.log", "node-b.log"} <= {file.name for file in folder.iterdir()}
    assert "2 of 2 nodes; starting the run" in (folder / "node-a.log").read_text()
    assert not (folder / "token").exists()
    for node in slurm.nodes:
        assert processes_of_ray(node) == []


@pytest.mark.parametrize("before_time_limit", [True, False])
def test_a_job_that_is_signalled_saves_its_step(
    before_time_limit: bool, slurm: SlurmCluster, shared: Path, warm_ray: dict[str, str]
):
    """Before its time limit, SLURM signals the script, and the job is requeued and resumes; a user's signal ends it."""
    name = "limited" if before_time_limit else "stopped"
    job = submit(slurm, shared, write_run(shared, name, steps=400), warm_ray)
    slurm.wait_for(lambda: last_checkpoint(shared, name) >= 1 or ended(slurm, job), LIMIT_S)
    slurm.say("scancel", "--signal", "TERM" if before_time_limit else "USR1", "--batch", job)
    if before_time_limit:
        slurm.wait_for(lambda: slurm.state(job)["Restarts"] == "1", LIMIT_S)
    else:
        slurm.wait_for(lambda: ended(slurm, job), LIMIT_S)
    said = logs(shared, name)
    assert "SIGTERM is passed on to the run, which saves its step" in said
    assert "the run has ended with status 0" in said
    saved = last_checkpoint(shared, name)
    assert saved == trained_steps(shared, name)[-1] < 400, said
    if before_time_limit:
        again = shared / "runs" / name / "launch" / f"{job}.1" / "node-a.log"
        resumed = f"resuming after step {saved}:"
        slurm.wait_for(
            lambda: ended(slurm, job) or (again.exists() and resumed in again.read_text()), LIMIT_S
        )
        assert again.exists() and resumed in again.read_text(), logs(shared, name)
        slurm.say("scancel", job)
        slurm.wait_for(lambda: ended(slurm, job), LIMIT_S)
    assert slurm.state(job)["JobState"] == ("CANCELLED" if before_time_limit else "COMPLETED")


@pytest.mark.parametrize("has_others", [True, False])
def test_a_node_that_ray_loses_is_excluded_if_the_job_may_have_others(
    has_others: bool, slurm: SlurmCluster, network: Network, shared: Path, warm_ray: dict[str, str]
):
    """SLURM sees nothing wrong with the node; a job that may not have a third one starts on the same two."""
    name = "others" if has_others else "alone"
    for node in NODES:
        feature = "slow" if node == "node-c" else "fast"
        slurm.say("scontrol", "update", f"NodeName={node}", f"AvailableFeatures={feature}")
    options = () if has_others else ("--constraint", "fast")
    job = submit(slurm, shared, write_run(shared, name, steps=12), warm_ray, *options)
    slurm.wait_for(lambda: last_checkpoint(shared, name) >= 1 or ended(slurm, job), LIMIT_S)
    before = last_checkpoint(shared, name)
    assert 1 <= before < 12, logs(shared, name)
    node_named(network, "node-b").run("pkill", "-9", "raylet")
    slurm.wait_for(lambda: ended(slurm, job) and last_checkpoint(shared, name) > before, LIMIT_S)
    state, said = slurm.state(job), logs(shared, name)
    nodes = "node-a,node-c" if has_others else "node-a,node-b"
    assert (state["JobState"], state["Restarts"], state["NodeList"]) == ("COMPLETED", "1", nodes), said
    assert ("not excluded from the next start" in said) != has_others
    assert trained_steps(shared, name)[-1] == 12


def test_a_run_continues_on_other_nodes_when_one_dies(
    slurm: SlurmCluster, network: Network, shared: Path, warm_ray: dict[str, str]
):
    job = submit(slurm, shared, write_run(shared, "second", steps=12), warm_ray)
    slurm.wait_for(lambda: last_checkpoint(shared, "second") >= 1 or ended(slurm, job), LIMIT_S)
    before = last_checkpoint(shared, "second")
    assert 1 <= before < 12, logs(shared, "second")
    node_named(network, "node-b").close()
    slurm.wait_for(lambda: ended(slurm, job) and last_checkpoint(shared, "second") > before, LIMIT_S)
    state = slurm.state(job)
    said = logs(shared, "second")
    assert (state["JobState"], state["Restarts"], state["NodeList"]) == ("COMPLETED", "1", "node-a,node-c"), (
        said
    )
    assert "resuming after step" in said
    steps = trained_steps(shared, "second")
    assert steps[-1] == 12 and set(range(1, 13)) <= set(steps)


def node_named(network: Network, name: str) -> Host:
    return next(host for host in network.hosts if host.name == name)
