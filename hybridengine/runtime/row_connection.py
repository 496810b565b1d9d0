"""What a connection over which rows are fetched asks of its socket, at both ends."""

from __future__ import annotations

import os
import socket
import struct
from multiprocessing.connection import Connection


def configure(connection: Connection, timeout_s: float | None = None) -> None:
    """Let messages leave at once, and let every wait end with an OSError after `timeout_s` seconds (None: never).

    An answer is two messages. Unasked, the kernel holds the second back until the first is acknowledged (RFC 896),
    which the other end puts off for 40 ms and may for 500 (RFC 1122, section 4.2.3.2): for every column of a batch.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as twin:
        twin.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if timeout_s is not None:
            seconds = int(timeout_s)
            limit = struct.pack("ll", seconds, int((timeout_s - seconds) * 1e6))
            twin.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            twin.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
