"""Processes of episodes on other hosts: the lines of `wire.py` over TCP.

    rank  --  TCP  --  `hybridengine episodes serve`  --  a guarded process for each connection

Both sides show that they have the key before any other line: each sends random bytes, and the HMAC of both sides' bytes
under the key (RFC 2104, with SHA-256). Lines are not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridengine.config.episode_section import EpisodeSection
from hybridengine.episodes.wire import line
from hybridengine.errors import ConfigError, DataError
from hybridengine.guarded.process import GuardedProcess

TRIES = 5
"""Rounds over all addresses before a process counts as not to be had."""
PAUSE_S = 1.0
"""Time between two rounds, doubled after each."""
CONNECT_S = 5.0
"""Time limit for a connection, and for each line until the key is shown."""
KEY_BYTES = 16
"""Shortest key."""
LINE_BYTES = 2**20
"""Longest line before a process is started."""
RANK, HOST = b"rank", b"host"
"""What each side's HMAC begins with, so that neither can send back the other's."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A host that has gone without a word is noticed after 30 s."""

_logger = logging.getLogger(__name__)


def read_key(path: str | Path) -> bytes:
    """Return the key in a file, without white space around it; raise ConfigError for none or a short one."""
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"the key file {path} cannot be read ({error.strerror}); write a random text into it, the same on all hosts"
        ) from None
    if len(key) < KEY_BYTES:
        raise ConfigError(
            f"the key in {path} has {len(key)} bytes, fewer than {KEY_BYTES}; write a longer random text"
        )
    return key


class RemoteProcess:
    """A process of episodes on another host, as `GuardedProcess` is one on this."""

    def __init__(self, addresses: Sequence[str], key: bytes) -> None:
        """Connect to one of the addresses, from a random one on; raise DataError if none answers after `TRIES` rounds."""
        self.address, self.channel = _connected(addresses, key)

    def note_group(self) -> None:
        """Do nothing: the other host ends the process."""

    def end_text(self) -> str:
        """Return how the process has ended, as far as this host can know."""
        return f"on {self.address} ended, or the connection did (see the output of `hybridengine episodes serve`)"

    def close(self) -> None:
        """Close the connection, upon which the other host ends the process; idempotent."""
        self.channel.close()


def _connected(addresses: Sequence[str], key: bytes) -> tuple[str, socket.socket]:
    order = random.sample([*addresses], len(addresses))
    reasons: dict[str, str] = {}
    for number in range(TRIES):
        for address in order:
            try:
                channel = socket.create_connection(_parts(address), CONNECT_S)
            except OSError as error:
                reasons[address] = str(error.strerror or error)
                continue
            try:
                _prove(channel, key, RANK, HOST)
                _keep_alive(channel)
                return address, channel
            except (OSError, EOFError, ValueError) as error:
                channel.close()
                reasons[address] = str(error) or "it closed the connection: its key is another"
        if number < TRIES - 1:
            time.sleep(PAUSE_S * 2**number)
    told = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
    raise DataError(
        f"rollout.episode.addresses: no host answered in {TRIES} tries ({told}); start `hybridengine episodes serve`"
        " there, and compare addresses and keys"
    )


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _prove(channel: socket.socket, key: bytes, own: bytes, other: bytes) -> None:
    """Show that this side has the key, and check that the other has it; raise ValueError if it has not.

    The rank shows it first, so that a stranger who connects to a host learns nothing made with the key.
    """
    random_bytes = secrets.token_hex(32).encode()
    channel.sendall(random_bytes + b"\n")
    theirs = _line(channel)
    both = b" ".join((random_bytes, theirs) if own == RANK else (theirs, random_bytes))

    def code(side: bytes) -> bytes:
        return hmac.new(key, side + b" " + both, "sha256").hexdigest().encode()

    if own == RANK:
        channel.sendall(code(own) + b"\n")
    if not hmac.compare_digest(_line(channel), code(other)):
        raise ValueError("its key is another")
    if own == HOST:
        channel.sendall(code(own) + b"\n")


def _line(channel: socket.socket) -> bytes:
    """Return the next line without reading what follows it; raise EOFError at the end, ValueError for a long one."""
    found = bytearray()
    while len(found) < LINE_BYTES:
        part = channel.recv(4096, socket.MSG_PEEK)
        if not part:
            raise EOFError
        end = part.find(b"\n")
        found += channel.recv(len(part) if end < 0 else end + 1)
        if end >= 0:
            return bytes(found[:-1])
    raise ValueError(f"it sent a line of more than {LINE_BYTES} bytes")


def _keep_alive(channel: socket.socket) -> None:
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in KEEP_ALIVE.items():
        channel.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    # Also for what was sent and is not acknowledged, in milliseconds.
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


class EpisodeHost:
    """Runs a process for each rank that connects and has the key.

    Args:
        section: the function that may be run, its Python and its memory limit; a rank cannot ask for another function.
        tokenizer: folder of the tokenizer; by default that which a rank names.
        server: what a process runs.
    """

    def __init__(
        self, section: EpisodeSection, key: bytes, tokenizer: str | None, server: str, host: str, port: int
    ) -> None:
        self._section, self._key, self._tokenizer, self._server = section, key, tokenizer, server
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"--host {host} --port {port} cannot be listened at ({error.strerror}); choose another"
            ) from None
        self.port: int = self._listener.getsockname()[1]

    def serve(self, say: Callable[[str], None] = _logger.info) -> None:
        """Answer ranks until this process ends."""
        while True:
            try:
                channel, (host, port, *_) = self._listener.accept()
            except OSError:  # closed
                return
            arguments = (channel, f"{host}:{port}", say)
            threading.Thread(target=self._answer, args=arguments, daemon=True).start()

    def close(self) -> None:
        """Accept no more ranks."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _answer(self, channel: socket.socket, rank: str, say: Callable[[str], None]) -> None:
        with channel:
            try:
                channel.settimeout(CONNECT_S)
                _prove(channel, self._key, HOST, RANK)
                _keep_alive(channel)
                kind, content = json.loads(_line(channel))
                if (kind, content["path"]) != ("load", self._section.function):
                    text = f"is not what this host serves, {self._section.function}; give both the same configuration"
                    channel.sendall(line("wrong", text))
                    return
            except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
                say(f"{rank}: refused ({error or 'it closed the connection'})")
                return
            channel.settimeout(None)
            self._run(channel, rank, content, say)

    def _run(
        self, channel: socket.socket, rank: str, content: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        process = GuardedProcess(self._server, self._section.function or "", "episodes", self._section.python)
        own = {
            "memory_bytes": self._section.memory_bytes,
            "tokenizer": self._tokenizer or content["tokenizer"],
        }
        say(f"{rank}: process {process.pid} started")
        try:
            process.channel.sendall(line("load", {**content, **own}))
            forth = threading.Thread(target=_pass_on, args=(channel, process.channel), daemon=True)
            forth.start()
            _pass_on(process.channel, channel)
            ended = process.end_text()
        except OSError as error:
            ended = str(error)
        finally:
            process.close()
        say(f"{rank}: process {process.pid} {ended}")


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Send on what a socket receives, and end both connections when one ends."""
    with contextlib.suppress(OSError):
        while part := source.recv(2**16):
            target.sendall(part)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
