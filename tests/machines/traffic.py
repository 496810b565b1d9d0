"""Traffic between hosts, to see what their cables do: bytes one way, and round trips.

python traffic.py serve ADDRESS
python traffic.py send ADDRESS BYTES
python traffic.py ask ADDRESS TIMES
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.machines.hosts import Host, Network

PORT = 5077
BLOCK_BYTES = 2**18
IP_AND_TCP_BYTES = 52
"""Headers of each packet: IPv4, TCP and its time stamps."""
ETHERNET_BYTES = 14


@contextmanager
def listening(host: Host) -> Iterator[None]:
    """Run the other side of the traffic on a host."""
    with host.start(sys.executable, __file__, "serve", host.address, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            yield
        finally:
            server.kill()


def seconds_to_send(sender: Host, receiver: Host, num_bytes: int, limit_s: float = 60) -> float:
    """Return the time until the receiver, which is `listening`, has all bytes of a TCP connection."""
    done = sender.run(sys.executable, __file__, "send", receiver.address, num_bytes, limit_s=limit_s)
    return json.loads(done.stdout)


def round_trips_s(asker: Host, other: Host, times: int, limit_s: float = 60) -> list[float]:
    """Return the times of round trips over TCP to a host that is `listening`, in ascending order."""
    done = asker.run(sys.executable, __file__, "ask", other.address, times, limit_s=limit_s)
    return sorted(json.loads(done.stdout))


def on_the_wire(num_bytes: float) -> float:
    """Return the bytes of the frames that carry so many bytes over TCP, in packets of 1500 bytes."""
    headers = IP_AND_TCP_BYTES + ETHERNET_BYTES
    return num_bytes * (1500 + ETHERNET_BYTES) / (1500 + ETHERNET_BYTES - headers)


@contextmanager
def counted(network: Network) -> Iterator[Counter[tuple[str, str]]]:
    """Yield the bytes of frames that arrive in the block, by sender and receiver, which are known at its end."""
    sent = Counter[tuple[str, str]]()
    sent.subtract(network.sent_bytes())
    yield sent
    sent.update(network.sent_bytes())


def serve(address: str) -> None:
    """Take all bytes of each connection, and answer the last one of every line."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, PORT), family=family) as server:
        print("ready", flush=True)
        while True:
            with server.accept()[0] as connection, contextlib.suppress(ConnectionError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while block := connection.recv(BLOCK_BYTES):
                    if block.endswith(b"\n"):
                        connection.sendall(b"\n")


def send(connection: socket.socket, num_bytes: int) -> float:
    block = bytes(BLOCK_BYTES)
    begin = time.monotonic()
    for start in range(0, num_bytes, BLOCK_BYTES):
        connection.sendall(block[: num_bytes - start])
    connection.sendall(b"\n")
    assert connection.recv(1) == b"\n"
    return time.monotonic() - begin


def main() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, -20)  # what is measured is the cable, not the other tests
    what, address, *rest = sys.argv[1:]
    if what == "serve":
        serve(address)
    with socket.create_connection((address, PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = int(rest[0])
        seen = send(connection, number) if what == "send" else [send(connection, 0) for _ in range(number)]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
