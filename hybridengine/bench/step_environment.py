"""An environment of its own for TRL: made once, in a folder whose name tells what is in it, and used again."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from hybridengine.errors import ConfigError

TRL_PACKAGES = ("trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0")
STAMP = "complete.json"
"""File of an environment that says what it has; written last."""
INSTALL_TIMEOUT_S = 1800.0

Run = Callable[[Sequence[str]], None]


def requirements() -> tuple[str, ...]:
    """What the environment has: TRL, and this environment's torch, so that both sides have the same kernels."""
    return (f"torch=={version('torch')}", *TRL_PACKAGES)


def make_environment(folder: Path, say: Callable[[str], None], run: Run | None = None) -> Path:
    """The Python of the environment in `folder`, which is made where there is none, or only part of one.

    Raises:
        ConfigError: the folder cannot be written to, or the packages cannot be installed.
    """
    run = run or _run
    wanted = {"python": ".".join(map(str, sys.version_info[:2])), "packages": list(requirements())}
    digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:12]
    place = folder / f"trl-{digest}"
    python = place / "bin" / "python"
    with _locked(folder, place.name):
        if _stamp(place) == wanted and python.exists():
            return python
        say(f"making an environment for TRL in {place} (a few minutes, once): {', '.join(requirements())}")
        shutil.rmtree(place, ignore_errors=True)
        run([sys.executable, "-m", "venv", str(place)])
        run([str(python), "-m", "pip", "install", "--quiet", "--no-input", *requirements()])
        (place / STAMP).write_text(json.dumps(wanted))
    return python


def _stamp(place: Path) -> object:
    try:
        return json.loads((place / STAMP).read_text())
    except (OSError, ValueError):
        return None


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """Two commands that start together make one environment."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{name}.lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"--environment {folder} cannot be written to ({error.strerror}); name a folder that can, with 3 GB of space"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{' '.join(command[1:5])} took more than {INSTALL_TIMEOUT_S:g} s; look at the network, then run the command"
            " again"
        ) from None
    if done.returncode:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise ConfigError(
            f"the environment for TRL cannot be made: {' '.join(command[1:5])} failed\n{last}\nwhere pip does not find"
            " torch, name PyTorch's index in PIP_EXTRA_INDEX_URL; --only hybridengine measures without TRL"
        )
