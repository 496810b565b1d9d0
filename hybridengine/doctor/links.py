"""Links between nodes, tried as torch.distributed uses them: connections to ports that the system chooses, full of data.

A connection alone proves little: it takes packets of 60 bytes, which pass where larger ones are lost.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from hybridengine.controller.cluster import MOST_CONNECTING, TRY_LIMIT_S, connection_error
from hybridengine.launch.addresses import listen_everywhere

TRIAL_LIMIT_S = 4.0
"""Time limit for sending the trial, after which what has arrived is counted."""
TRIAL_BYTES = 64 * 2**20
SMALL_SEGMENT_BYTES = 500
"""TCP payload that any network for IPv4 lets pass."""


@dataclass(frozen=True)
class LinkFacts:
    """Facts about the way from a node to another one; without figures if it was only connected."""

    error: str = ""
    """Reason why no connection is possible."""
    bytes_s: float = 0.0
    """Rate at which data has arrived."""
    round_trip_s: float = 0.0
    """Shortest time from sending a packet to its acknowledgement."""
    lost_share: float = 0.0
    """Share of the packets that were sent again."""
    packet_bytes: int = 0
    """Size of the largest packets, if none of them has arrived; 0 if data arrives."""
    passes_small: bool = False
    """True if data arrives in small packets where `packet_bytes` do not."""


class _TcpInfo(NamedTuple):
    """The kernel's figures of a connection: fields of struct tcp_info in linux/tcp.h (4.6 and later)."""

    packet_bytes: int
    """Size of the largest packets, IP's headers included."""
    num_sent_again: int
    acknowledged_bytes: int
    round_trip_us: int
    num_data_segments: int

    @classmethod
    def of(cls, connection: socket.socket) -> _TcpInfo:
        # 8 bytes, 24 numbers of 32 bits, 4 of 64, 6 of 32.
        fields = struct.unpack("8B24I4Q6I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160))
        numbers, long, last = fields[8:32], fields[32:36], fields[36:]
        return cls(numbers[13], numbers[23], long[2], last[3], last[5])


_listeners = list[socket.socket]()


def open_port() -> int:
    """Listen on a port that the system chooses, as the store of a run does, and discard what arrives, until this process
    ends; return the port."""
    listener = listen_everywhere()
    _listeners.append(listener)
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    return int(listener.getsockname()[1])


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_discard, args=(connection,), daemon=True).start()


def _discard(connection: socket.socket) -> None:
    with connection, suppress(OSError):
        while connection.recv(2**20):
            pass


def reach(ports: Mapping[str, int], measured: Collection[str] = ()) -> dict[str, LinkFacts]:
    """Return the facts about the ways from this node to ports of others, by address; data is sent to those `measured`."""
    with ThreadPoolExecutor(MOST_CONNECTING) as threads:
        errors = threads.map(lambda host: connection_error(host, ports[host]), ports)
    found = {host: LinkFacts(error=error) for host, error in zip(ports, errors, strict=True)}
    for host in measured:  # one after the other: each gets all of the link
        if not found[host].error:
            with suppress(OSError):  # it was there a moment ago
                found[host] = measure(host, ports[host])
    return found


def unreachable(ports: Mapping[str, int]) -> dict[str, LinkFacts]:
    """Return the facts about those ways from this node to ports of others that lead nowhere: few of thousands, if any."""
    return {host: one for host, one in reach(ports).items() if one.error}


def probe_all(ports: Mapping[str, int]) -> dict[str, LinkFacts]:
    """Return the facts, without figures, about the ways from this node to ports of others, whatever listens there."""
    with ThreadPoolExecutor(MOST_CONNECTING) as threads:
        return dict(zip(ports, threads.map(_probe, ports, ports.values()), strict=True))


def _probe(host: str, port: int) -> LinkFacts:
    if error := connection_error(host, port):
        return LinkFacts(error=error)
    try:
        found = measure(host, port)
    except OSError:  # it has been told data that it does not understand, and has hung up
        return LinkFacts()
    return LinkFacts(packet_bytes=found.packet_bytes, passes_small=found.passes_small)


def measure(host: str, port: int) -> LinkFacts:
    """Return the facts about the way to a port at which data is discarded."""
    info, seconds = _send(host, port)
    if info.acknowledged_bytes <= 1:  # the connection itself counts as one
        try:
            small, _ = _send(host, port, SMALL_SEGMENT_BYTES)
            passes_small = small.acknowledged_bytes > 1
        except OSError:  # as in `_probe`
            passes_small = True
        return LinkFacts(packet_bytes=info.packet_bytes, passes_small=passes_small)
    return LinkFacts(
        bytes_s=info.acknowledged_bytes / seconds,
        round_trip_s=info.round_trip_us / 1e6,
        lost_share=info.num_sent_again / max(1, info.num_data_segments),
    )


def _send(host: str, port: int, segment_bytes: int | None = None) -> tuple[_TcpInfo, float]:
    """Send the trial; return the state of the connection when all has arrived, or at the limit, and the seconds."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        if segment_bytes is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
        connection.settimeout(TRY_LIMIT_S)
        connection.connect((host, port))
        begin = time.monotonic()
        connection.settimeout(TRIAL_LIMIT_S / 40)  # the limit is looked at in between
        data, num_left = memoryview(bytes(2**20)), TRIAL_BYTES
        while (seconds := time.monotonic() - begin) < TRIAL_LIMIT_S:
            if num_left:
                with suppress(TimeoutError):
                    num_left -= connection.send(data[:num_left])
            elif _TcpInfo.of(connection).acknowledged_bytes >= TRIAL_BYTES:
                break
            else:
                time.sleep(0.001)
        info = _TcpInfo.of(connection)
        # What was not sent is forgotten, so that closing does not leave it to the kernel.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return info, seconds


def next_nodes(nodes: Sequence[str]) -> dict[str, list[str]]:
    """Return the nodes to which each sends data, one or none, so that each sends and receives once at the same time."""
    return {
        node: [after] * (len(nodes) > 1) for node, after in zip(nodes, [*nodes[1:], *nodes[:1]], strict=True)
    }
