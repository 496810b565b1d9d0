"""The folder of one launch, which all its nodes see: small files by which they tell each other how far they are."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from hybridengine.errors import OutputError, WorkerError
from hybridengine.files import within, writing

ANSWER_LIMIT_S = 30.0
"""Time limit for the folder's file system to answer."""
POLL_S = 0.5
"""Interval at which files are looked for; a file system of a cluster may show them later."""
REPORT_EVERY_S = 15.0
NAMED = 8
"""Number of missing nodes that a message names."""
HEAD, RAY, END, TOKEN = "head.json", "ray.json", "end.json", "token"
STOP = "stop"
"""File with which a launcher asks the first node to stop its run."""
LOST = "lost"
"""File with the names of nodes that have left Ray, one a line, for the launcher."""


class LaunchEnded(WorkerError):
    """The first node has ended the launch."""


class Meeting:
    """Files of a launch, each written once and seen by every node as a whole."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """Make the folder unless another node was faster; raise OutputError if this is not possible."""
        self.folder, self._say = folder, say
        with writing(folder):
            within(ANSWER_LIMIT_S, partial(folder.mkdir, parents=True, exist_ok=True, mode=0o700))

    def write(self, name: str, **values: Any) -> None:
        """Write a JSON object under a name; OutputError if this fails, or takes longer than ANSWER_LIMIT_S."""
        self._write(name, json.dumps(values))

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the object of this name; None while there is none.

        Raises OutputError if the folder cannot be read, or does not answer within ANSWER_LIMIT_S.
        """
        self.names()  # NFS asks its server anew
        return self._object(name)

    def names(self) -> set[str]:
        """Return the names of all files."""
        try:
            return set(within(ANSWER_LIMIT_S, os.listdir, self.folder))
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise _unreadable(self.folder, error) from error

    def _object(self, name: str) -> dict[str, Any] | None:
        try:
            return json.loads(within(ANSWER_LIMIT_S, (self.folder / name).read_text))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise _unreadable(self.folder / name, error) from error

    def write_token(self) -> Path:
        """Write a new token for Ray, which only this user can read, and return its file."""
        self._write(TOKEN, secrets.token_hex(32))
        return self.token_file

    def write_lost(self, nodes: Iterable[str]) -> None:
        """Write the names of nodes that have left Ray."""
        self._write(LOST, "".join(f"{node}\n" for node in nodes))

    @property
    def token_file(self) -> Path:
        """File of Ray's token."""
        return (self.folder / TOKEN).resolve()

    def wait(
        self,
        names: dict[str, str],
        deadline: float,
        doing: str,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> dict[str, dict[str, Any]]:
        """Return the objects of all files in `names`, which map each to the node that writes it, once they are there.

        `check` raises what makes waiting pointless. Progress is printed.

        Raises:
            WorkerError: some are missing at `deadline`, a time of `time.monotonic`, or the launch has ended.
        """
        found = dict[str, dict[str, Any]]()
        begin, reported = time.monotonic(), 0.0
        while True:
            # One listing for all names: one for each would take time that grows with the square of the nodes.
            there = self.names()
            for name in names:
                if name in there and name not in found and (value := self._object(name)) is not None:
                    found[name] = value
            missing = [node for name, node in names.items() if name not in found]
            if not missing:
                return found
            self.check_running()
            check()
            now = time.monotonic()
            state = f"{doing}: {len(found)} of {len(names)}; waiting for {listed(missing)} in {self.folder}"
            if now >= deadline:
                raise WorkerError(
                    f"{state} since {now - begin:.0f} s, which is the limit; see whether these hosts run"
                    " `hybridengine launch node` and share this folder: a node whose folder is another file system's"
                    " waits for itself. Put run.folder on a file system that all share, or raise --start-limit"
                )
            if now - reported >= REPORT_EVERY_S:
                self._say(state)
                reported = now
            time.sleep(POLL_S)

    def check_running(self) -> None:
        """Raise LaunchEnded if the first node has ended the launch."""
        if (end := self.read(END)) is not None:
            raise LaunchEnded(f"the launch has ended: {end['reason'] or 'its command is done'}")

    def close(self) -> None:
        """Remove the token."""
        with contextlib.suppress(OSError):
            within(ANSWER_LIMIT_S, lambda: self.token_file.unlink())

    def _write(self, name: str, text: str) -> None:
        with writing(self.folder / name):
            within(ANSWER_LIMIT_S, self._replace, name, text)

    def _replace(self, name: str, text: str) -> None:
        number, path = tempfile.mkstemp(dir=self.folder, prefix=f".{name}-")  # mode 600
        with os.fdopen(number, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path, self.folder / name)


def _unreadable(path: Path, error: OSError | ValueError) -> OutputError:
    reason = getattr(error, "strerror", None) or error
    return OutputError(f"{path} cannot be read ({reason}); all nodes must see the same folder of runs")


def listed(names: Iterable[str]) -> str:
    """Return names with commas, the first ones if there are many."""
    every = list(names)
    more = f" and {len(every) - NAMED} others" if len(every) > NAMED else ""
    return ", ".join(every[:NAMED]) + more
