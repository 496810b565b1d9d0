"""Hosts have their own names, addresses, processes and memory, share a folder, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.machines.hosts import ROOT, Host, Network, joined_hosts
from tests.machines.switch import INTERFACE

NAMES = ("first", "second", "third")
SHM_BYTES = 3 * 2**20
RESOLVE = """
import socket, sys, time
begin = time.monotonic()
try:
    print(socket.gethostbyname(sys.argv[1]))
except socket.gaierror:
    print("unknown" if time.monotonic() - begin < 5 else "a name server was asked")
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def network(shared: Path) -> Iterator[Network]:
    with joined_hosts(NAMES, shared=[shared], shm_bytes=SHM_BYTES) as network:
        yield network


def test_hosts_are_made_in_seconds(shared: Path):
    begin = time.monotonic()
    with joined_hosts([f"host{number}" for number in range(4)], shared=[shared]):
        pass
    assert time.monotonic() - begin < 20


def test_a_host_has_its_own_name_which_resolves_to_its_loopback(network: Network):
    for host in network.hosts:
        assert host.run("hostname").stdout.strip() == host.name
        assert host.run(sys.executable, "-c", RESOLVE, host.name).stdout.strip() == "127.0.1.1"
    assert socket.gethostname() not in NAMES


def test_a_host_has_an_address_on_the_network(network: Network):
    for number, host in enumerate(network.hosts, 1):
        assert host.address == f"10.77.0.{number}"
        words = host.run("ip", "-4", "-o", "addr", "show", "dev", INTERFACE).stdout.split()
        assert f"{host.address}/24" in words
    assert INTERFACE not in os.listdir("/sys/class/net")


def test_a_name_may_resolve_to_nothing_or_to_addresses_of_the_network(shared: Path):
    with joined_hosts(NAMES[:2], own_name="unknown") as network:
        assert network.hosts[0].run(sys.executable, "-c", RESOLVE, "first").stdout == "unknown\n"
    with joined_hosts(NAMES[:2], own_name="address", ip_version=6) as network:
        for name, address in zip(NAMES, ("fd77::1", "fd77::2"), strict=False):
            for host in network.hosts:
                assert host.run("getent", "hosts", name).stdout.split()[0] == address


def test_hosts_share_a_folder_and_no_temporary_files(network: Network, shared: Path):
    first, second, _ = network.hosts
    first.run("sh", "-c", f"echo one > {shared}/file; echo two > /tmp/own; echo three > /dev/shm/own")
    assert second.run("cat", shared / "file").stdout == "one\n"
    assert first.run("cat", "/tmp/own", "/dev/shm/own").stdout == "two\nthree\n"
    for folder in ("/tmp", "/dev/shm"):
        assert "own" not in second.run("ls", folder).stdout.split()
        assert "own" not in os.listdir(folder)


def test_the_shared_memory_has_the_size_that_was_asked_for(network: Network):
    host = network.hosts[2]
    done = host.run("dd", "if=/dev/zero", "of=/dev/shm/large", "bs=64K", check=False)
    assert "No space left on device" in done.stdout
    assert host.run("stat", "-c", "%s", "/dev/shm/large").stdout.strip() == str(SHM_BYTES)
    host.run("rm", "/dev/shm/large")


def test_a_host_sees_its_own_processes_alone(network: Network):
    first, second, _ = network.hosts
    with first.start("sleep", "1000") as sleeping:
        eventually(lambda: "sleep" in commands(first))
        assert commands(first)[0] == "cat" and len(commands(first)) < 10
        assert "sleep" not in commands(second)
        sleeping.kill()
    eventually(lambda: "sleep" not in commands(first))


def test_orphans_leave_no_zombies(network: Network):
    host = network.hosts[0]
    host.run("sh", "-c", "sleep 0.1 & exit 0")
    eventually(lambda: "sleep" not in commands(host))


def test_nothing_is_left_when_the_process_of_the_tests_is_killed(shared: Path):
    """Its hosts have processes that ignore what ends others, mounts, and connections."""
    before = left_behind()
    with subprocess.Popen(
        [sys.executable, "-c", MAKE_HOSTS_AND_WAIT, shared],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as tests:
        assert tests.stdout is not None
        namespaces = set(tests.stdout.readline().split())
        assert len(namespaces) == 3 and namespaces <= network_namespaces()
        tests.send_signal(signal.SIGKILL)
    eventually(lambda: not namespaces & network_namespaces())
    assert left_behind() <= before


MAKE_HOSTS_AND_WAIT = """
import os, sys, time
from pathlib import Path
from tests.machines.hosts import joined_hosts
from tests.machines.traffic import listening
with joined_hosts(["one", "two", "three"], shared=[Path(sys.argv[1])]) as network:
    for host in network.hosts:
        os.spawnvp(os.P_NOWAIT, "nsenter", host.inside("sh", "-c", "trap '' HUP INT TERM; while :; do sleep 1; done"))
    with listening(network.hosts[0]):
        print(*(os.readlink(f"/proc/{host.pid}/ns/net") for host in network.hosts), flush=True)
        time.sleep(1000)
"""


def network_namespaces() -> set[str]:
    """Return the network namespaces of all processes."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):  # it has ended
            found.add(os.readlink(link))
    return found


def left_behind() -> set[str]:
    """Return what a test process could leave outside its hosts: interfaces, named namespaces, mounts."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    named = Path("/run/netns").glob("*")
    return {*os.listdir("/sys/class/net"), *map(str, named), *(line.split()[4] for line in mounts)}


def commands(host: Host) -> list[str]:
    """Return the names of the processes that a host sees."""
    return host.run("sh", "-c", "cat /proc/[0-9]*/comm", check=False).stdout.split()


def eventually(holds: Callable[[], bool], limit_s: float = 30) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"it does not hold within {limit_s:g} s"
        time.sleep(0.05)
