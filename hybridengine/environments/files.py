"""Prompts of a run's environment, written to its data files before ranks start.

The environment is loaded in a process of its own: its constructor is foreign code, may want the network, and may need the
packages of another Python.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hybridengine.config import RunConfig
from hybridengine.data.tasks import HELD_OUT_FILE, TRAIN_FILE
from hybridengine.errors import DataError
from hybridengine.guarded.process import GuardedProcess

SERVER = "hybridengine.environments.child:serve"


def write_environment_files(config: RunConfig) -> dict[str, Path]:
    """Write the training and the held-out prompts; return their paths under "train" and "held_out".

    The same section gives the same bytes. Raises DataError for an environment that is not installed, is unknown, refuses
    its options, has too few prompts, or does not write them within `timeouts.start_s`.
    """
    section = config.data.environment
    assert section is not None, "called for runs with an environment"
    python = config.rollout.episode.python if config.rollout.episode is not None else None
    rows = _rows(section.model_dump(mode="json"), python, config.timeouts.start_s)
    files = {HELD_OUT_FILE: rows[: section.eval_rows], TRAIN_FILE: rows[section.eval_rows :]}
    config.data_folder.mkdir(parents=True, exist_ok=True)
    for name, some in files.items():
        (config.data_folder / name).write_text("".join(json.dumps(row) + "\n" for row in some))
    return {Path(name).stem: config.data_folder / name for name in files}


def _rows(section: dict[str, Any], python: str | None, timeout_s: float) -> list[dict[str, Any]]:
    """Return the rows that a process writes for a section."""
    named = f"data.environment.name={section['name']}"
    process = GuardedProcess(SERVER, section["name"], "environment", python)
    end, received = time.monotonic() + timeout_s, bytearray()
    try:
        process.channel.sendall(json.dumps(section).encode() + b"\n")
        while not received.endswith(b"\n"):
            process.channel.settimeout(max(0.01, end - time.monotonic()))
            if not (part := process.channel.recv(2**20)):
                raise ConnectionError
            received += part
    except TimeoutError:
        raise DataError(
            f"{named} did not write its prompts within {timeout_s:g} s; it may wait for the network: download beforehand"
            " what it reads, or raise timeouts.start_s"
        ) from None
    except ConnectionError:
        where = f", of {python}," if python else ""
        raise DataError(
            f"{named}: its process{where} {process.end_text()} while it wrote the prompts (see its output above);"
            " correct the environment"
        ) from None
    finally:
        process.close()
    kind, content = json.loads(received)
    if kind != "rows":
        raise DataError(f"{named} {content}")
    return content
