"""What `hybridengine doctor` says of a cluster with a fault, before a run meets it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.machines.faults import (
    BUSY_S,
    NAMES,
    NODE_LOST_S,
    MountedFolder,
    add_dead_interface,
    start,
    write_run,
)
from tests.machines.hosts import Network, joined_hosts
from tests.machines.ray_nodes import RayCluster, warm_folder
from tests.machines.switch import Cable

pytestmark = pytest.mark.timeout(900)

SHM_BYTES = 1200 * 2**20
ADDRESSES = ["10.77.0.1", "10.77.0.2"]
LARGE_PACKETS = "packets of 1500 bytes to {} are lost, and small ones arrive: ranks would hang"


@dataclass(frozen=True)
class Examined:
    """Findings of the doctor."""

    status: int
    findings: list[dict[str, Any]]
    console: str

    def told(self, subject: str, level: str) -> dict[str, list[str]]:
        """Return the texts of a subject's findings of a level, by node; "" for those of the whole cluster."""
        found: dict[str, list[str]] = {}
        for one in self.findings:
            if (one["subject"], one["level"]) == (subject, level):
                for node in one["nodes"] or [""]:
                    found.setdefault(node, []).append(one["text"])
        return found


def examine(cluster: RayCluster, folder: Path, *overrides: str, limit_s: float = 2 * BUSY_S) -> Examined:
    """Run the doctor on the first host, for the run of the tests of faults."""
    output = folder / "findings.json"
    job = start(cluster, "doctor", write_run(folder), *overrides, "--json", output)
    status = job.end(limit_s)
    assert "Traceback" not in job.console, job.console
    return Examined(status, json.loads(output.read_text()), job.console)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examined")


@pytest.fixture(scope="module")
def network(folder: Path, warm_ray: dict[str, str]) -> Iterator[Network]:
    with joined_hosts(NAMES, shared=[folder, warm_folder(warm_ray)], shm_bytes=SHM_BYTES) as network:
        yield network


@pytest.fixture(scope="module")
def cluster(network: Network, warm_ray: dict[str, str]) -> RayCluster:
    return RayCluster(network.hosts, warm_ray)


@pytest.fixture
def mended(network: Network) -> Iterator[None]:
    """Mend the cable of the second host after a test."""
    yield
    network.change("second", **asdict(Cable()))


def test_nothing_is_found_where_nothing_is_wrong(cluster: RayCluster, folder: Path):
    found = examine(cluster, folder)
    assert found.status == 0, found.console
    assert [one for one in found.findings if one["level"] == "problem"] == []
    assert "2 ranks meet and sum 64.0 MiB right" in str(found.told("links", "ok")), found.console


@pytest.mark.usefixtures("mended")
def test_a_link_that_drops_large_packets(cluster: RayCluster, network: Network, folder: Path):
    network.change("second", mtu=1400)
    found = examine(cluster, folder)
    assert found.status == 1
    expected = {ADDRESSES[0]: [LARGE_PACKETS.format(ADDRESSES[1])]}
    assert found.told("links", "problem") == expected, found.console
    assert found.told("links", "warning") == {"": ["no ranks were started: nodes do not reach each other"]}


@pytest.mark.usefixtures("mended")
def test_a_fault_of_a_node_that_the_run_does_not_use(cluster: RayCluster, network: Network, folder: Path):
    network.change("second", mtu=1400)
    sizes = [*(f"{role}.parallel=1-1-1" for role in ("actor", "critic", "reference")), "actor.generate=1-1"]
    found = examine(cluster, folder, "cluster.ranks_per_node=[1]", *sizes)
    assert found.status == 0, found.console
    assert f"not examining {ADDRESSES[1]}: no rank of the run will be there" in found.console
    assert found.told("links", "problem") == {}


@pytest.mark.usefixtures("mended")
def test_a_slow_link(cluster: RayCluster, network: Network, folder: Path):
    """A tenth of a link of 1 Gbit/s."""
    network.change("second", rate_bits_s=1e8, delay_s=0.005, queue_s=1.0)
    found = examine(cluster, folder)
    assert found.status == 0, found.console
    told = found.told("links", "warning")
    assert told[ADDRESSES[0]][0].startswith(f"data goes to {ADDRESSES[1]} at "), found.console
    assert told[ADDRESSES[1]][0].startswith(f"data goes to {ADDRESSES[0]} at "), found.console


@pytest.mark.usefixtures("mended")
def test_a_link_that_loses_packets(cluster: RayCluster, network: Network, folder: Path):
    network.change("second", loss=0.01)
    found = examine(cluster, folder)
    assert found.status == 0, found.console
    (told,) = (text for text in found.told("links", "warning")[ADDRESSES[0]] if "lost" in text)
    assert f"of the packets to {ADDRESSES[1]} are lost: collectives wait for them" in told


def test_full_shared_memory(cluster: RayCluster, network: Network, folder: Path):
    """Less than there should be on the second host, and then nothing."""
    second = network.hosts[1]
    second.run("dd", "if=/dev/zero", "of=/dev/shm/left", "bs=1M", "count=300")
    low = examine(cluster, folder)
    second.run("dd", "if=/dev/zero", "of=/dev/shm/left", "bs=64K", check=False)
    full = examine(cluster, folder)
    second.run("rm", "/dev/shm/left")
    (text,) = low.told("memory", "warning").pop(ADDRESSES[1])
    assert low.status == 0
    assert text == "/dev/shm has 900.0 MiB free: Ray and NCCL pass data through it", low.console
    assert ADDRESSES[0] not in low.told("memory", "warning")
    text = "/dev/shm has 0 B free: processes that use more of it are killed (SIGBUS)"
    assert full.status == 1
    assert full.told("memory", "problem") == {ADDRESSES[1]: [text]}, full.console


def test_a_name_that_leads_to_another_host(cluster: RayCluster, network: Network, folder: Path):
    second = network.hosts[1]
    second.run("sh", "-c", f"cp /etc/hosts /tmp/before; echo {ADDRESSES[1]} {NAMES[0]} >> /etc/hosts")
    found = examine(cluster, folder)
    second.run("sh", "-c", "cat /tmp/before > /etc/hosts")
    assert found.status == 0, found.console
    text = f"first resolves to {ADDRESSES[1]}, which is no address of that host ({ADDRESSES[0]})"
    assert found.told("ports", "warning") == {ADDRESSES[1]: [text]}, found.console


def test_folders_that_hang_or_lag(cluster: RayCluster, network: Network, folder: Path):
    """That of the second host, and then that of the host on which the doctor runs."""
    runs = folder / "runs"
    runs.mkdir(exist_ok=True)
    first, second = network.hosts
    mounts = [MountedFolder(first, runs), MountedFolder(second, runs, "--write-rate=4M")]
    lagging = examine(cluster, folder)
    mounts[1].hang()
    other = examine(cluster, folder)
    mounts[1].answer()
    mounts[0].hang()
    begin = time.monotonic()
    own = examine(cluster, folder)
    took_s = time.monotonic() - begin
    for mount in mounts:
        mount.answer()
        mount.close()
    (text,) = lagging.told("shared files", "warning")[ADDRESSES[1]]
    assert text.startswith(f"{runs} is slow: a file of one byte takes "), lagging.console
    assert ADDRESSES[0] not in lagging.told("shared files", "warning")
    expected = f"{runs} cannot be written to (TimeoutError: no answer within 30 s)"
    assert other.status == 1
    assert other.told("shared files", "problem") == {ADDRESSES[1]: [expected]}, other.console
    assert own.status == 1 and took_s < 2 * BUSY_S
    assert expected in str(own.told("shared files", "problem")), own.console


def test_a_host_whose_link_is_down(cluster: RayCluster, network: Network, folder: Path):
    """Comes last: Ray gives the host up."""
    network.change("second", up=False)
    begin = time.monotonic()
    found = examine(cluster, folder)
    assert time.monotonic() - begin < BUSY_S
    assert found.status == 1
    (text,) = found.told("ports", "problem")[ADDRESSES[1]]
    assert text.startswith("the node does not answer: 10.77.0.1 cannot connect to it ("), found.console
    time.sleep(NODE_LOST_S)
    again = examine(cluster, folder)
    assert again.status == 1
    (text,) = again.told("devices", "problem")[""]
    assert text.startswith("ranks_per_node=[1, 1] needs 2 ranks on 2 nodes"), again.console
    assert "room for [2] ranks per node: 10.77.0.1 with" in text


def test_clocks_that_are_apart(tmp_path: Path, warm_ray: dict[str, str]):
    with joined_hosts(NAMES, shared=[tmp_path, warm_folder(warm_ray)]) as network:
        cluster = RayCluster(network.hosts[:1], warm_ray)
        cluster.join_ahead(network.hosts[1], 90)
        found = examine(cluster, tmp_path)
    (text,) = found.told("clock", "problem")[ADDRESSES[1]]
    assert text == "the clock is 1 min 30 s ahead: signed requests expire", found.console
    assert ADDRESSES[0] not in found.told("clock", "problem")


def test_hosts_that_have_ipv6_alone(tmp_path: Path, warm_ray: dict[str, str]):
    with joined_hosts(
        NAMES, shared=[tmp_path, warm_folder(warm_ray)], ip_version=6, own_name="unknown"
    ) as network:
        found = examine(RayCluster(network.hosts, warm_ray), tmp_path)
    assert found.status == 0, found.console
    assert found.told("ports", "ok") == {"": ["2 nodes reach each other's ports"]}
    assert "2 ranks meet and sum 64.0 MiB right" in str(found.told("links", "ok"))


def test_an_interface_that_leads_nowhere(tmp_path: Path, warm_ray: dict[str, str]):
    """Ray knows the second host by an address that nobody reaches."""
    with joined_hosts(NAMES, shared=[tmp_path, warm_folder(warm_ray)]) as network:
        addresses = add_dead_interface(network)
        cluster = RayCluster(network.hosts[:1], warm_ray)
        cluster.join(network.hosts[1], "--node-ip-address", addresses[1])
        found = examine(cluster, tmp_path)
    assert found.status == 1
    # Ray gives the host up before or after it is examined.
    cut_off = f"{addresses[1]} (host second): the node does not answer: 10.77.0.1 cannot connect to it ("
    given_up = f"10.77.0.1 with 2 CPUs and 0 GPUs; {addresses[1]} (host second), which no longer answers Ray"
    assert cut_off in found.console or given_up in found.console, found.console


def test_a_firewall_between_the_hosts_of_ranks(tmp_path: Path, warm_ray: dict[str, str]):
    """Both reach the head node, which has no ranks of the run and on which the doctor runs."""
    with joined_hosts(["head", *NAMES], shared=[tmp_path, warm_folder(warm_ray)]) as network:
        cluster = RayCluster(network.hosts[:1], warm_ray, num_cpus=0)
        for host in network.hosts[1:]:
            cluster.join(host, num_cpus=2)
        network.block(("first", "second"))
        found = examine(cluster, tmp_path)
    assert found.status == 1
    told = found.told("ports", "problem")
    for node, other in (("10.77.0.2", "10.77.0.3"), ("10.77.0.3", "10.77.0.2")):
        (text,) = told.pop(node)
        assert text.startswith(f"a port of {other} cannot be reached ("), found.console
    assert told == {}, found.console
    assert found.told("links", "warning") == {"": ["no ranks were started: nodes do not reach each other"]}
