"""A real `hybridengine serve` process, and the client's Python that drives it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.clients.warm_model import NAME

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "hybridengine.cli.main"]
CLIENT_PYTHON = ROOT / ".venv-clients/bin/python"
KEY = "tml-clients"
START_S, CLIENT_S, END_S = 600, 600, 60  # machines are shared


def run_command(*arguments: object) -> None:
    """Run `hybridengine` to its end; raise AssertionError with its output if it fails."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=ROOT,
        env=server_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 0, done.stdout


def server_environment() -> dict[str, str]:
    """Return the environment of processes of this project."""
    # Ranks, which Ray starts, import this checkout as well.
    return os.environ | {"PYTHONPATH": str(ROOT)}


class Server:
    """A `hybridengine serve` process with everything that it has started; `start` after `kill` is a restart."""

    def __init__(self, folder: Path, model: Path, **sections: dict[str, Any]) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self.config = folder / "serve.yaml"
        self.checkpoints = folder / "runs/serve/checkpoints"
        self.config.write_text(
            yaml.safe_dump(
                {
                    "run": {"name": "serve", "folder": str(folder / "runs")},
                    "cluster": {"ranks_per_node": [2]},
                    "model": {"path": str(model)},
                    "actor": {"parallel": "1-2-1", "generate": "1-1"},
                    "rollout": {
                        "max_prompt_tokens": 256,
                        "max_response_tokens": 64,
                        "kv_cache_bytes": "32MiB",
                    },
                    "serve": {"port": self.port, "api_key": KEY, "model_name": NAME},
                    "timeouts": {"call_s": 120},
                }
                | sections
            )
        )
        self._process: psutil.Popen | None = None
        self._family: set[psutil.Process] = set()

    def start(self) -> None:
        """Start the process and wait until it serves."""
        with self.log.open("a") as log:
            self._process = psutil.Popen(
                [*COMMAND, "serve", str(self.config)],
                cwd=ROOT,
                env=server_environment(),
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)
        self._family = {self._process, *self._process.children(recursive=True)}

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5) as answer:
                return json.load(answer) == {"status": "ok"}
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def memory_bytes(self) -> int:
        """Return the resident memory of the process that clients talk to, without its ranks."""
        assert self._process is not None, "start first"
        return self._process.memory_info().rss

    def kill(self) -> None:
        """Send SIGKILL to the process, its Ray and all ranks."""
        if self._process is not None and self._process.is_running():
            self._family |= {*self._process.children(recursive=True)}
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._family, timeout=END_S)

    def kill_rank(self) -> None:
        """Send SIGKILL to the process of one rank."""
        assert self._process is not None, "start first"
        family = self._process.children(recursive=True)
        rank = next(each for each in family if "RankProcess" in " ".join(each.cmdline()))
        rank.kill()

    def stop(self) -> int:
        """Ask the process to end, as a user does; return its exit status."""
        assert self._process is not None, "start first"
        try:
            self._process.terminate()
            return self._process.wait(END_S)
        finally:
            self.kill()

    def client(self, *arguments: object, cwd: Path, python: Path = CLIENT_PYTHON) -> str:
        """Run a client's Python in `cwd`; return what it prints, or raise AssertionError with both logs."""
        return finish(self.begin_client(*arguments, cwd=cwd, python=python), self.log)

    def begin_client(
        self, *arguments: object, cwd: Path, python: Path = CLIENT_PYTHON
    ) -> subprocess.Popen[str]:
        """Start a client's Python in `cwd`, offline, with address and key of this server."""
        ours = {"PYTHONPATH", "VIRTUAL_ENV"}
        return subprocess.Popen(
            [str(python), *map(str, arguments)],
            cwd=cwd,
            env={name: value for name, value in os.environ.items() if name not in ours}
            | {
                "HOME": str(self.folder),  # some clients keep files there
                "HF_HUB_OFFLINE": "1",
                "HF_HOME": str(self.folder / "huggingface"),
                "NO_PROXY": "127.0.0.1",
                "OPENAI_API_KEY": KEY,
                "OPENAI_BASE_URL": f"{self.url}/v1",
                "TINKER_API_KEY": KEY,
                "TINKER_BASE_URL": self.url,
                "TINKER_TELEMETRY": "0",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def result_of(output: str) -> dict[str, Any]:
    """Return the last line that a client has printed."""
    return json.loads(output.splitlines()[-1])


def finish(process: subprocess.Popen[str], log: Path) -> str:
    """Return the output of a client that has succeeded; raise AssertionError with both logs if it fails or hangs."""
    try:
        output, _ = process.communicate(timeout=CLIENT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        output += f"\nkilled after {CLIENT_S} s"
    assert process.returncode == 0, f"{output}\n---- server ----\n{log.read_text()}"
    return output
