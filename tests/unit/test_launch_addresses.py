"""Addresses at which the nodes of a launch find each other."""

from __future__ import annotations

import errno
import socket
from collections import namedtuple

import psutil
import pytest

from hybridengine.errors import ConfigError
from hybridengine.launch.addresses import answering, common_address, own_addresses, reached

Carried = namedtuple("Carried", "family address")
State = namedtuple("State", "isup")


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with two networks, one of which is down."""
    v4, v6 = socket.AF_INET, socket.AF_INET6
    carried = {
        "lo": [Carried(v4, "127.0.0.1"), Carried(v6, "::1")],
        "eth0": [Carried(v6, "fd77::5"), Carried(v6, "fe80::5%eth0"), Carried(v4, "10.0.0.5")],
        "ib0": [Carried(psutil.AF_LINK, "00:00")],
        "ib0:1": [Carried(v4, "192.168.7.5")],
        "old": [Carried(v4, "10.9.9.9")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: carried)
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {name: State(name != "old") for name in carried if ":" not in name}
    )
    names = {"node-5": [(v4, 0, 0, "", ("192.168.7.5", 0))], "debian": [(v4, 0, 0, "", ("127.0.1.1", 0))]}

    def resolve(name: str, port: None) -> object:
        if name not in names:
            raise socket.gaierror
        return names[name]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.usefixtures("interfaces")
def test_a_node_knows_the_addresses_that_others_may_reach():
    every = ["10.0.0.5", "192.168.7.5", "fd77::5"]
    assert own_addresses() == every
    assert own_addresses(name="debian") == own_addresses(name="unknown") == every
    assert own_addresses(name="node-5") == ["192.168.7.5", "10.0.0.5", "fd77::5"]
    assert own_addresses(interface="eth0") == ["10.0.0.5", "fd77::5"]
    assert own_addresses(address="fd77::5") == ["fd77::5"]


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize("given", [{"interface": "old"}, {"interface": "eth9"}, {"address": "10.9.9.9"}])
def test_an_address_or_interface_that_a_node_lacks_is_refused(given: dict[str, str]):
    with pytest.raises(
        ConfigError, match=r"which has fd77::5 \(eth0\), 10.0.0.5 \(eth0\), 192.168.7.5 \(ib0\); name"
    ):
        own_addresses(**given)


def test_an_address_is_reached_if_it_answers_with_the_secret_of_the_launch():
    with answering("a" * 32) as port:
        addresses = ["127.0.0.1", "127.0.0.2", "::1", "no address"]
        found = reached(addresses, port, "a" * 32)
        assert found["127.0.0.1"] == "127.0.0.1"
        assert found["127.0.0.2"] in ("127.0.0.1", "127.0.0.2")
        assert "no address" not in found
        assert reached(["127.0.0.1"], port, "b" * 32) == {}, "another machine of this address"
    assert reached(["127.0.0.1"], port, "a" * 32) == {}


def test_a_connection_that_is_lost_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch):
    errors, accept = [errno.EMFILE, errno.ECONNABORTED], socket.socket.accept

    def late(listener: socket.socket) -> object:
        if errors:
            raise OSError(errors.pop(), "lost")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", late)
    with answering("a" * 32) as port:
        assert "127.0.0.1" in reached(["127.0.0.1"], port, "a" * 32)
    assert not errors


def test_one_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hybridengine.launch.addresses.CONNECT_LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert reached(["127.0.0.1"], silent.getsockname()[1], "a") == {}


def test_the_first_address_that_all_have_reached_is_used():
    candidates = ["10.0.0.1", "192.168.7.1", "172.17.0.1"]
    everywhere = {"172.17.0.1": "172.17.0.9", "192.168.7.1": "192.168.7.9"}
    assert common_address(candidates, {"b": {"10.0.0.1": "x"} | everywhere, "c": everywhere}) == "192.168.7.1"
    assert common_address(candidates, {}) == "10.0.0.1"
    with pytest.raises(
        ConfigError, match=r"has the addresses 10.0.0.1, 192.168.7.1, 172.17.0.1, and c reached none of"
    ):
        common_address(candidates, {"b": everywhere, "c": {}})
    with pytest.raises(ConfigError, match=r"b reached 10.0.0.1; c reached 192.168.7.1; open the ports"):
        common_address(candidates, {"b": {"10.0.0.1": "x"}, "c": {"192.168.7.1": "y"}})
