"""A process of episodes, and an episode, as their rank knows them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hybridengine.config.episode_section import EpisodeSection
from hybridengine.data.chat import Chat
from hybridengine.episodes.remote import RemoteProcess, read_key
from hybridengine.episodes.wire import VERSION, DrawnTurn, Limits, RunTokenizer, Wanted, line
from hybridengine.errors import DataError
from hybridengine.guarded.process import GuardedProcess

SERVER = "hybridengine.episodes.child:serve"
SEND_TIMEOUT_S = 30.0
"""Time limit for a process to read a line."""


@dataclass(eq=False)
class Episode:
    number: int
    row: Mapping[str, Any]
    turns: list[DrawnTurn]
    key: int = 0
    """Number under which a process runs it: another one for each start, since lines of an earlier one may follow."""
    process: Process | None = None
    num_ends: int = 0
    """Processes that have ended while it was alone in them."""
    begun_s: float = 0.0
    wanted: Wanted | None = None
    """Turn that is being drawn for it, also while it begins again."""
    is_waiting: bool = False
    """True if its process has asked for that turn."""


@dataclass(eq=False)
class Process:
    guarded: GuardedProcess | RemoteProcess
    received: bytearray = field(default_factory=bytearray)
    running: dict[int, Episode] = field(default_factory=dict)
    """Its episodes, by their keys."""
    is_reserved: bool = False
    """True while it runs a group of suspects, and no other episodes."""
    is_stuck: bool = False
    """True if it reads no lines."""
    is_worn: bool = False
    """True if threads of ended episodes go on in it: another one has been started, and it ends after its episodes."""
    silent_s: float = 0.0
    """Time for which it has said nothing while this rank listened."""

    def send(self, kind: str, content: Any) -> None:
        """Send a line; a process that has ended is noticed when it is read."""
        try:
            self.guarded.channel.sendall(line(kind, content))
        except TimeoutError:
            self.is_stuck = True
        except OSError:
            pass


class Starter:
    """Starts processes for a section's function, here or on its hosts."""

    def __init__(
        self, section: EpisodeSection, limits: Limits, tokenizer: str | None, start_timeout_s: float
    ) -> None:
        self._section, self._limits, self._tokenizer = section, limits, tokenizer
        self._start_timeout_s = start_timeout_s

    def start(self) -> Process:
        """Return a process that has loaded the function; raise DataError if it cannot, or not in time."""
        section = self._section
        assert section.function is not None, "checked with the configuration"
        if section.addresses:
            assert section.key_file is not None, "checked with the configuration"
            remote = RemoteProcess(section.addresses, read_key(section.key_file))
            process, place = Process(remote), remote.address
        else:
            process = Process(GuardedProcess(SERVER, section.function, "episodes", section.python))
            place = section.python or sys.executable
        content = {
            "version": VERSION,
            "path": section.function,
            "limits": self._limits.__dict__,
            "options": section.options,
            "tokenizer": self._tokenizer,
            "run_tokenizer": self._run_tokenizer,
            "memory_bytes": section.memory_bytes,
        }
        process.send("load", content)
        process.guarded.channel.settimeout(self._start_timeout_s)
        key = f"rollout.episode.function={section.function}"
        try:
            kind, text = json.loads(_received_line(process))
        except (TimeoutError, EOFError, ConnectionError) as error:
            late = isinstance(error, TimeoutError)
            how = f"did not load within {self._start_timeout_s:g} s" if late else process.guarded.end_text()
            process.guarded.close()
            raise DataError(
                f"{key}, while it was loaded: its process {how}; correct the module, or raise timeouts.start_s"
            ) from None
        if kind != "wrong" and text != VERSION:
            process.guarded.close()
            raise DataError(
                f"{key}: {place} has hybridengine {text or 'of an earlier version'}, and this rank {VERSION}; install the"
                " same version for both"
            )
        if kind != "loaded":
            process.guarded.close()
            raise DataError(f"{key} on {place} {text}" if section.addresses else f"{key} {text}")
        process.guarded.note_group()
        process.guarded.channel.settimeout(SEND_TIMEOUT_S)
        return process

    @cached_property
    def _run_tokenizer(self) -> dict[str, Any] | None:
        """The fields of `RunTokenizer`; None for processes that read the same folder by the same packages."""
        if self._tokenizer is None or not (self._section.addresses or self._section.python):
            return None
        from hybridengine.data.tokenizer import load_tokenizer  # takes seconds

        chat = Chat(load_tokenizer(self._tokenizer, pad_with_eos=True))
        return RunTokenizer(self._tokenizer, chat.digests()).__dict__


def _received_line(process: Process) -> bytes:
    while b"\n" not in process.received:
        part = process.guarded.channel.recv(2**20)
        if not part:
            raise EOFError
        process.received += part
    text, _, rest = process.received.partition(b"\n")
    process.received = rest
    return bytes(text)
