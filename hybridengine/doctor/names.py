"""Names of hosts as each node resolves them: /etc/hosts and DNS may differ between nodes, or be wrong on all."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import psutil

from hybridengine.controller.cluster import MOST_CONNECTING

RESOLVE_LIMIT_S = 20.0
"""Time limit for resolving the names of all hosts; names that take longer count as unknown."""


@dataclass(frozen=True)
class NameFacts:
    """Facts about a node's name and addresses, and about the names that it resolves."""

    host: str
    addresses: Sequence[str]
    """Addresses of all interfaces but loopback."""
    resolved: Mapping[str, Sequence[str]]
    """Addresses by name of a host, of the names that the node can resolve."""


def name_facts(hosts: Sequence[str]) -> NameFacts:
    """Return the facts about this node and what it resolves the names of hosts to."""
    threads = ThreadPoolExecutor(MOST_CONNECTING)
    asked = {threads.submit(_addresses_of, host): host for host in hosts}
    answered, _ = wait(asked, RESOLVE_LIMIT_S)
    threads.shutdown(wait=False, cancel_futures=True)
    carried = {_number(one.address) for each in psutil.net_if_addrs().values() for one in each}
    own = [one for one in carried if one and not ipaddress.ip_address(one).is_loopback]
    return NameFacts(
        socket.gethostname(),
        sorted(own),
        {asked[one]: found for one in answered if (found := one.result())},
    )


def _addresses_of(host: str) -> list[str]:
    """Return the addresses of a name in the order in which they are tried; none if it is unknown."""
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return []
    return list(dict.fromkeys(_number(str(place[0])) for *_, place in found))


def _number(address: str) -> str:
    """Return an IP address in its usual form, without the interface behind a %; empty for another address (MAC)."""
    try:
        return str(ipaddress.ip_address(address.partition("%")[0]))
    except ValueError:
        return ""
