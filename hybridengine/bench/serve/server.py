"""A `hybridengine serve` process that is started, restarted, killed and asked for the calls on its ranks."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hybridengine.errors import WorkerError, WorkerTimeoutError

KEY = "tml-bench"
MODEL = "model"
"""Name that clients give as `base_model`."""
LOG_LINES = 12
END_S = 60.0
POLL_S = 0.2
SWITCH = "switch_to_generate"
"""Method of the ranks that gathers the weights for generation."""


@dataclass(frozen=True)
class RankCalls:
    """Calls on the ranks since the last look."""

    seconds: float
    """Sum of their durations, each on its slowest rank; the server makes one call at a time."""
    count: Counter[str]
    """Number of calls by method."""


class ServerProcess:
    """A server at a port of its own with its files in `folder`; `start` after `kill` is a restart.

    Args:
        sections: configuration, without `run` and without what `serve` gets here.
        timeout_s: longest start.
    """

    def __init__(self, folder: Path, sections: Mapping[str, Any], timeout_s: float) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url, self.folder = f"http://127.0.0.1:{self.port}", folder
        self.log = folder / "server.log"
        self._timeout_s, self._calls, self._read_bytes = timeout_s, folder / "calls.jsonl", 0
        self._process: psutil.Popen | None = None
        folder.mkdir(parents=True)
        serve = {"port": self.port, "api_key": KEY, "model_name": MODEL, "calls_file": str(self._calls)}
        serve |= sections.get("serve", {})
        written = {**sections, "run": {"name": "serve", "folder": str(folder)}, "serve": serve}
        self.config = folder / "serve.yaml"
        self.config.write_text(json.dumps(written))  # JSON is YAML

    @property
    def run_folder(self) -> Path:
        """Folder of the database and the checkpoints."""
        return self.folder / "serve"

    def saved(self, path: str) -> Path:
        """Return the folder of the checkpoint at a tinker:// path."""
        model_id, kind, name = path.removeprefix("tinker://").split("/")
        (folder,) = (self.run_folder / "checkpoints" / model_id.replace(":", "-") / kind).glob(f"{name}-seq*")
        return folder

    def start(self) -> None:
        """Start the server and wait until it answers; raise WorkerError or WorkerTimeoutError with the end of its log."""
        command = [sys.executable, "-m", "hybridengine.cli.main", "serve", str(self.config)]
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C reaches this process, which then ends the server.
            self._process = psutil.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + self._timeout_s
        while not self._answers():
            if self._process.poll() is not None:
                raise WorkerError(
                    f"the server has ended with status {self._process.poll()}{self._last_lines()}"
                )
            if time.monotonic() > deadline:
                raise WorkerTimeoutError(
                    f"the server has not answered within {self._timeout_s:g} s; allow more with --timeout"
                    f"{self._last_lines()}"
                )
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5) as answer:
                return json.load(answer) == {"status": "ok"}
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        return "".join(f"\n  {line}" for line in lines)

    def processes(self) -> list[psutil.Process]:
        """Return the server's process and those that it has started, or nothing if it has ended."""
        if self._process is None or not self._process.is_running():
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return [psutil.Process(self._process.pid), *self._process.children(recursive=True)]
        return []

    def kill(self) -> None:
        """Send SIGKILL to the server, its Ray and all ranks, and wait until they are gone."""
        family = self.processes()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=END_S)
        if self._process is not None:
            self._process.wait()

    def stop(self) -> int | None:
        """Ask the server to end, as a user does, and kill what is left of it; return its status, None if killed."""
        family, status = self.processes(), None
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(psutil.TimeoutExpired, subprocess.TimeoutExpired):
                status = self._process.wait(END_S)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=END_S)
        return status

    def take_calls(self) -> RankCalls:
        """Return the calls on the ranks that have ended since the last time."""
        with self._calls.open() as file:
            file.seek(self._read_bytes)
            lines = [json.loads(line) for line in file.read().splitlines()]
            self._read_bytes = file.tell()
        return RankCalls(
            sum(line["seconds"] for line in lines),
            Counter(line["call"].rpartition(".")[2] for line in lines),
        )


@contextlib.contextmanager
def running_server(folder: Path, sections: Mapping[str, Any], timeout_s: float) -> Iterator[ServerProcess]:
    """Start a server, and end it on exit."""
    server = ServerProcess(folder, sections, timeout_s)
    try:
        server.start()
        yield server
    finally:
        server.stop()
