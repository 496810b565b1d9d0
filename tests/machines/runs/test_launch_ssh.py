"""`hybridengine launch ssh` over real sshd: hosts that do not answer, that die, or that lose the others are replaced."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
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

pytestmark = pytest.mark.timeout(1500)
LIMIT_S = 900.0
NOBODY = "10.77.0.77"
SSHD = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def network(shared: Path, warm_ray: dict[str, str]) -> Iterator[Network]:
    """Hosts with sshd, but for the first."""
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", shared / name], check=True)
    (shared / "sshd_config").write_text(SSHD.format(folder=shared))
    names = ["control", "node-a", "node-b", "node-c"]
    with joined_hosts(names, shared=[shared, warm_folder(warm_ray)], own_name="unknown") as network:
        for host in network.hosts[1:]:
            host.run("mkdir", "-p", "/run/sshd")
            host.run("/usr/sbin/sshd", "-f", shared / "sshd_config")
        yield network


def launch(
    network: Network, shared: Path, config: Path, hosts: list[str], warm_ray: dict[str, str]
) -> subprocess.Popen[str]:
    """Start a launch on the first host, with output in a file beside its configuration."""
    variables = launch_environment(warm_ray)
    exports = "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    options = {
        "IdentityFile": shared / "key",
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
    }
    return network.hosts[0].start(
        *(sys.executable, "-m", "hybridengine.cli.main", "launch", "ssh", config, "--hosts", ",".join(hosts)),
        *("--setup", exports, "--start-limit", "400"),
        *(word for name, value in options.items() for word in ("--ssh-option", f"{name}={value}")),
        env=variables,
        stdout=config.with_suffix(".log").open("w"),
        stderr=subprocess.STDOUT,
    )


def test_a_host_that_the_others_no_longer_reach_is_replaced(
    network: Network, shared: Path, warm_ray: dict[str, str]
):
    """Over ssh, the launcher still does."""
    config = write_run(shared, "unreached", steps=12)
    log = config.with_suffix(".log")
    first, second, third = network.hosts[1:]
    with launch(network, shared, config, [host.address for host in network.hosts[1:]], warm_ray) as started:
        wait_for(lambda: last_checkpoint(shared, "unreached") >= 1, started, log)
        network.block(*((second.name, other.name) for other in (first, third)))
        status = started.wait(LIMIT_S)
    network.block()
    said = log.read_text()
    assert status == 0, said
    assert f"attempt 1 has lost {second.address}\n" in said
    assert "resuming after step" in said.partition("attempt 2 on")[2]
    assert trained_steps(shared, "unreached")[-1] == 12


def test_hosts_that_fail_are_replaced(network: Network, shared: Path, warm_ray: dict[str, str]):
    config = write_run(shared, "spare", steps=12)
    log = config.with_suffix(".log")
    _, first, second, third = network.hosts
    hosts = [NOBODY, *(f"root@{host.address}" for host in (first, second, third))]
    with launch(network, shared, config, hosts, warm_ray) as started:
        wait_for(lambda: last_checkpoint(shared, "spare") >= 1, started, log)
        before = last_checkpoint(shared, "spare")
        second.close()
        status = started.wait(LIMIT_S)
    said = log.read_text()
    assert status == 0 and 1 <= before < 12, said
    assert f"{NOBODY} cannot be used: ssh: connect to host {NOBODY}" in said
    assert f"attempt 2 on root@{first.address}, root@{third.address}" in said
    assert "resuming after step" in said.partition("attempt 2 on")[2]
    assert f"root@{first.address}: launch: 2 of 2 nodes; starting the run" in said.splitlines()
    assert trained_steps(shared, "spare")[-1] == 12
    for host in (first, third):
        assert processes_of_ray(host) == []


def test_a_launch_that_is_asked_to_stop_saves_its_step(
    network: Network, shared: Path, warm_ray: dict[str, str]
):
    config = write_run(shared, "stopped", steps=400)
    log = config.with_suffix(".log")
    hosts = [host.address for host in (network.hosts[1], network.hosts[3])]
    with launch(network, shared, config, hosts, warm_ray) as started:
        wait_for(lambda: last_checkpoint(shared, "stopped") >= 1, started, log)
        launcher = child_of(network.hosts[0], "launch ssh")
        network.hosts[0].run("kill", f"-{signal.SIGTERM.value}", launcher)
        status = started.wait(LIMIT_S)
    said = log.read_text()
    assert status == 0, said
    assert "SIGTERM is passed on to the run, which saves its step" in said
    assert last_checkpoint(shared, "stopped") == trained_steps(shared, "stopped")[-1]
    for host in (network.hosts[1], network.hosts[3]):
        assert processes_of_ray(host) == []


def test_a_run_whose_launcher_is_killed_saves_its_step(
    network: Network, shared: Path, warm_ray: dict[str, str]
):
    config = write_run(shared, "orphaned", steps=400)
    log = config.with_suffix(".log")
    hosts = [host.address for host in (network.hosts[1], network.hosts[3])]
    with launch(network, shared, config, hosts, warm_ray) as started:
        wait_for(lambda: last_checkpoint(shared, "orphaned") >= 1, started, log)
        network.hosts[0].run("kill", f"-{signal.SIGKILL.value}", child_of(network.hosts[0], "launch ssh"))
        started.wait(LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while any(processes_of_ray(host) for host in (network.hosts[1], network.hosts[3])):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)
    assert last_checkpoint(shared, "orphaned") == trained_steps(shared, "orphaned")[-1]


def child_of(host: Host, words: str) -> str:
    """Return the process id, on its host, of the command with these words."""
    lines = host.run("ps", "-eo", "pid,args", "--width", "300").stdout.splitlines()
    return next(line.split()[0] for line in lines if words in line)


def wait_for(holds, started: subprocess.Popen[str], log: Path) -> None:
    """Wait until something holds while a launch goes on."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert started.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)
