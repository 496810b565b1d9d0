"""A real `hybridengine serve` process, and the client's Python that drives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hybridengine.bench.serve.server import KEY, ServerProcess
from tests.clients.warm_model import NAME

ROOT = Path(__file__).parents[2]
CLIENT_PYTHON = ROOT / ".venv-clients/bin/python"
START_S, CLIENT_S = 600, 600  # machines are shared


def run_command(*arguments: object) -> None:
    """Run `hybridengine` to its end; raise AssertionError with its output if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "hybridengine.cli.main", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 0, done.stdout


class Server(ServerProcess):
    """A server of a model, and the client's Python that drives it; `others` are added to its sections."""

    def __init__(self, folder: Path, model: Path, **others: dict[str, Any]) -> None:
        sections = {
            "cluster": {"ranks_per_node": [2]},
            "model": {"path": str(model)},
            "actor": {"parallel": "1-2-1", "generate": "1-1"},
            "rollout": {"max_prompt_tokens": 256, "max_response_tokens": 64, "kv_cache_bytes": "32MiB"},
            "serve": {"model_name": NAME},
            "timeouts": {"call_s": 120},
        }
        for name, section in others.items():
            sections[name] = sections.get(name, {}) | section
        super().__init__(folder / "server", sections, START_S)

    def memory_bytes(self) -> int:
        """Return the resident memory of the process that clients talk to, without its ranks."""
        return self.processes()[0].memory_info().rss

    def kill_rank(self) -> None:
        """Send SIGKILL to the process of one rank."""
        next(each for each in self.processes() if "RankProcess" in " ".join(each.cmdline())).kill()

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
