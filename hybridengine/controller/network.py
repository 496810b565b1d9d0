"""Network setup of a rank by addresses known to Ray; a host name may resolve to one that other hosts cannot reach."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

from hybridengine.errors import WorkerError

if TYPE_CHECKING:  # a rank imports torch when it takes its seat
    from torch.distributed import TCPStore

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
NOISE = re.compile(r"\[[^]]*\.\w+:\d+\] ?|\$\d+$|\.? This is typically caused by .*")
"""File and line in gloo's messages, and its guess at the cause."""
CONNECT_LIMIT_S = 30.0
"""Time limit for connecting to rank 0's store, which listens before the other ranks learn its address."""


def is_number(address: str) -> bool:
    """Return True if an address is an IP address, False if it is a name."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def interfaces() -> list[str]:
    """Return the network interfaces of this node with their IP addresses, for messages."""
    families = (socket.AF_INET, socket.AF_INET6)
    carried = {
        name: [one.address for one in addresses if one.family in families]
        for name, addresses in psutil.net_if_addrs().items()
    }
    return [f"{name} has {', '.join(addresses)}" for name, addresses in carried.items() if addresses]


def interface_of(address: str) -> str | None:
    """Return the network interface that carries an address of this node, or None; loopback carries 127.0.0.0/8."""
    if not is_number(address):
        return None
    wanted = ipaddress.ip_address(address)
    for name, carried in psutil.net_if_addrs().items():
        for one in carried:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                own = ipaddress.ip_address(one.address)
                if own == wanted or (own.is_loopback and wanted.is_loopback):
                    return name
    return None


def socket_environment(address: str) -> dict[str, str]:
    """Return the variables that make gloo, NCCL and vLLM listen on `address`; empty if that is a name.

    Raises:
        WorkerError: no interface carries the address, and the environment names none.
    """
    interface = interface_of(address)
    if interface is None:
        if not is_number(address) or INTERFACE_VARIABLES[0] in os.environ:
            return {}
        raise WorkerError(
            f"host {socket.gethostname()} has no interface with the address {address} by which Ray knows it"
            f" ({'; '.join(interfaces())}); start Ray there with an address that the host has"
            f" (`ray start --node-ip-address=...`), or with {' and '.join(INTERFACE_VARIABLES)} set to the interface on"
            " which the other hosts reach it"
        )
    # NCCL matches interfaces by prefix unless there is an equals sign.
    return dict(zip(INTERFACE_VARIABLES, (interface, f"={interface}"), strict=True)) | {
        "VLLM_HOST_IP": address
    }


def open_store(address: str, timeout: timedelta) -> TCPStore:
    """Return a store that listens on a port of `address` only; raise WorkerError if the node lacks this address."""
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # Port 0: the system picks a free port, and the store takes over the socket, so that no other process gets it.
        listener = socket.create_server((address, 0), family=family, backlog=4096)
    except OSError as error:
        raise WorkerError(
            f"rank 0 cannot listen at {address} on host {socket.gethostname()} ({error.strerror}); start Ray there with"
            " an address that the host has: `ray start --node-ip-address=...`"
        ) from None
    port, own = listener.getsockname()[1], listener.detach()
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=own
    )


def connect_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Return a client of rank 0's store that waits up to `timeout` for keys; raise WorkerError if it is unreachable."""
    from torch.distributed import TCPStore

    try:
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=CONNECT_LIMIT_S))
    except RuntimeError:
        raise WorkerError(
            f"host {socket.gethostname()} cannot reach rank 0's store at {address} port {port} within"
            f" {CONNECT_LIMIT_S:g} s; open the ports that the system chooses (net.ipv4.ip_local_port_range) between the"
            " nodes, and start Ray with addresses that the others reach: `ray start --node-ip-address=...`"
        ) from None
    store.set_timeout(timeout)
    return store


def interfaces_set() -> dict[str, str]:
    """Return the variables that name interfaces, as they are set in this process's environment."""
    return {name: os.environ[name] for name in INTERFACE_VARIABLES if name in os.environ}


def not_met(rank: int, node: str, set_by_user: Mapping[str, str], error: Exception) -> WorkerError:
    """Return the error for a rank that did not reach the others through torch.distributed.

    Args:
        set_by_user: variables that named interfaces before the run set its own.
    """
    reason = NOISE.sub("", str(error).strip().split("\n")[0]).rstrip(".")
    place = ", ".join([f"Ray's node {node}", *(f"{name}={value!r}" for name, value in set_by_user.items())])
    rule = "the nodes must reach each other's ports"
    if set_by_user:
        rule += (
            f" at the addresses of these interfaces: unset {' and '.join(set_by_user)} where Ray is started to take the"
            " addresses of Ray's nodes, and"
        )
    else:
        rule += ":"
    return WorkerError(
        f"rank {rank} on host {socket.gethostname()} ({place}) did not meet the other ranks: {reason}; {rule} open the"
        " ports that the system chooses (net.ipv4.ip_local_port_range) between the nodes"
    )
