"""The network interface of a node's address, and the variables that depend on it."""

from __future__ import annotations

import re
import socket
from types import SimpleNamespace

import psutil
import pytest

from hybridengine.controller import network
from hybridengine.errors import WorkerError

CARRIED = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["192.168.1.5", "fe80::1%eth0"],
    "ib0": ["10.0.0.9", "fd00::9"],
}


@pytest.fixture(autouse=True)
def _interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(address: str) -> SimpleNamespace:
        return SimpleNamespace(family=socket.AF_INET6 if ":" in address else socket.AF_INET, address=address)

    link = SimpleNamespace(family=psutil.AF_LINK, address="02:fc:00:00:00:01")
    found = {name: [link, *map(one, addresses)] for name, addresses in CARRIED.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("10.0.0.9", "ib0"),
        ("fd00::9", "ib0"),
        ("FD00:0::9", "ib0"),
        ("192.168.1.5", "eth0"),
        ("127.0.0.10", "lo"),
        ("a-name", None),
    ],
)
def test_the_interface_that_carries_an_address(address: str, interface: str | None) -> None:
    assert network.interface_of(address) == interface
    expected = {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "VLLM_HOST_IP": address,
    }
    assert network.socket_environment(address) == (expected if interface else {})


def test_an_address_that_no_interface_carries_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the environment names the interface, as it may behind a translation of addresses."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert network.interface_of("10.0.0.8") is None
    with pytest.raises(WorkerError) as raised:
        network.socket_environment("10.0.0.8")
    assert re.fullmatch(
        r"host \S+ has no interface with the address 10\.0\.0\.8 by which Ray knows it \(lo has 127\.0\.0\.1, ::1;"
        r" eth0 has 192\.168\.1\.5, fe80::1%eth0; ib0 has 10\.0\.0\.9, fd00::9\); start Ray there with an address"
        r" that the host has \(`ray start --node-ip-address=\.\.\.`\), or with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        r" set to the interface on which the other hosts reach it",
        str(raised.value),
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert network.socket_environment("10.0.0.8") == {}


def test_an_address_that_the_host_does_not_have_is_one_error() -> None:
    with pytest.raises(
        WorkerError, match=r"rank 0 cannot listen at 203\.0\.113\.1 on host .*; start Ray there with an"
    ):
        network.open_store("203.0.113.1", timeout=network.timedelta(seconds=1))


def test_a_store_that_does_not_answer_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "CONNECT_LIMIT_S", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # it never listens: the port refuses, and nobody else can take it
        port = silent.getsockname()[1]
        with pytest.raises(
            WorkerError,
            match=rf"cannot reach rank 0's store at 127\.0\.0\.1 port {port} within 1 s; open the ports",
        ):
            network.connect_store("127.0.0.1", port, network.timedelta(seconds=1))


CLOSED = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]:52864. This is"
    " typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error."
    " GLHF! \N{BEACH WITH UMBRELLA}\N{VARIATION SELECTOR-16}"
)


@pytest.mark.parametrize(
    ("set_by_user", "place", "rule"),
    [
        ({}, "", "the nodes must reach each other's ports: open the ports that the system chooses"),
        (
            {"GLOO_SOCKET_IFNAME": "eth1"},
            ", GLOO_SOCKET_IFNAME='eth1'",
            "the nodes must reach each other's ports at the addresses of these interfaces: unset GLOO_SOCKET_IFNAME where"
            " Ray is started to take the addresses of Ray's nodes, and open the ports that the system chooses",
        ),
    ],
)
def test_ranks_that_do_not_meet_name_only_what_the_user_has_set(
    set_by_user: dict[str, str], place: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo's guess at the cause is left out: nothing has crashed where a firewall drops packets."""
    monkeypatch.setattr(socket, "gethostname", lambda: "first")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib0")  # the run's own
    assert str(network.not_met(0, "10.0.0.9", set_by_user, RuntimeError(CLOSED))) == (
        f"rank 0 on host first (Ray's node 10.0.0.9{place}) did not meet the other ranks: Connection closed by peer"
        f" [10.0.0.3]:52864; {rule} (net.ipv4.ip_local_port_range) between the nodes"
    )


def test_variables_that_name_interfaces_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib0")
    assert network.interfaces_set() == {"NCCL_SOCKET_IFNAME": "=ib0"}
