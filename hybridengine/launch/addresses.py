"""Addresses at which the nodes of a launch reach each other, found by connecting instead of by resolving names.

A host's own name may resolve to loopback, an interface may lead nowhere, and there may be no default route. Therefore the
first node listens on all its addresses, every other node connects to each of them, and the first address that all have
reached is used. The source address of a node's connection is the address of that node.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import psutil

from hybridengine.errors import ConfigError

CONNECT_LIMIT_S = 5.0
"""Time limit for one connection, and for the answer to it."""
BACKLOG = 4096


def own_addresses(interface: str | None = None, address: str | None = None, name: str = "") -> list[str]:
    """Return this node's addresses that others may reach: that of `name` first, then IPv4, then IPv6, by interface.

    Raises:
        ConfigError: the node lacks `interface` or `address`, or has no address but loopback.
    """
    states = psutil.net_if_stats()
    found = dict[str, str]()
    for label, carried in psutil.net_if_addrs().items():
        device = label.partition(":")[0]  # eth0:1 is a further address of eth0
        for one in carried:
            if one.family in (socket.AF_INET, socket.AF_INET6) and states[device].isup:
                number = ipaddress.ip_address(one.address)
                if not (number.is_loopback or number.is_link_local):
                    found[str(number)] = device
    listing = ", ".join(f"{one} ({device})" for one, device in found.items()) or "none but loopback"
    if address is not None:
        if address not in found:
            raise ConfigError(
                f"--address {address} is no address of {socket.gethostname()}, which has {listing}; name one of these"
            )
        return [address]
    if interface is not None:
        found = {one: device for one, device in found.items() if device == interface}
    if not found:
        wanted = f"--interface {interface} has no address on" if interface else "no address to reach"
        raise ConfigError(
            f"{wanted} {socket.gethostname()}, which has {listing}; name another --interface, or set up its network"
        )
    named = _addresses_of(name)
    return sorted(found, key=lambda one: (one not in named, ":" in one))


def _addresses_of(name: str) -> set[str]:
    """Return the addresses to which a host name resolves; empty if it does not."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(name, None)} if name else set()
    except OSError:
        return set()


@contextlib.contextmanager
def answering(secret: str) -> Iterator[int]:
    """Answer `secret` to every connection on any address of this node; yield the port."""
    greeting = secret.encode()
    with listen_everywhere() as listener:
        thread = threading.Thread(target=_answer, args=(listener, greeting), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):  # it may not be connected, which wakes `accept` all the same
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(CONNECT_LIMIT_S)


def listen_everywhere() -> socket.socket:
    """Return a socket that listens on all addresses of this node, at a port that the system chooses."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=BACKLOG)


def _answer(listener: socket.socket, greeting: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EBADF):  # it is shut down, or closed
                return
            time.sleep(0.1)  # this connection is gone, or this process has no file left for it
            continue
        with connection, contextlib.suppress(OSError):
            connection.settimeout(CONNECT_LIMIT_S)
            connection.sendall(greeting)


def reached(addresses: Iterable[str], port: int, secret: str) -> dict[str, str]:
    """Return the addresses that answer `secret` on `port`, each with the own address from which it was reached."""
    found = dict[str, str]()
    for address in addresses:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, port), timeout=CONNECT_LIMIT_S) as connection,
        ):
            heard = b""
            while len(heard) < len(secret) and (more := connection.recv(len(secret))):
                heard += more
            if heard == secret.encode():  # another machine of some private network may have this address
                found[address] = connection.getsockname()[0]
    return found


def common_address(candidates: Sequence[str], found: Mapping[str, Mapping[str, str]]) -> str:
    """Return the first address of the first node that all nodes, given by name, have reached.

    Raises:
        ConfigError: there is none.
    """
    for address in candidates:
        if all(address in ways for ways in found.values()):
            return address
    cut_off = [name for name, ways in found.items() if not ways]
    if cut_off:
        reason = f"{', '.join(cut_off)} reached none of them"
    else:
        ways = "; ".join(f"{name} reached {', '.join(way)}" for name, way in found.items())
        reason = f"none is reached by all nodes: {ways}"
    raise ConfigError(
        f"the first node has the addresses {', '.join(candidates)}, and {reason}; open the ports that the system chooses"
        " between the nodes, or name the --interface of the network that they share"
    )
