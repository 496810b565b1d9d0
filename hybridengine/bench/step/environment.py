"""Virtual environment for TRL, created once in a folder named after the digest of its contents."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from hybridengine.errors import ConfigError

TRL_PACKAGES = ("trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0")
STAMP = "complete"
"""File that marks a complete environment; written last."""
INSTALL_TIMEOUT_S = 1800.0


def requirements() -> tuple[str, ...]:
    """Return TRL's packages and the torch version of this environment, so that both sides have the same kernels."""
    return (f"torch=={version('torch')}", *TRL_PACKAGES)


def make_environment(folder: Path, say: Callable[[str], None]) -> Path:
    """Return the Python executable of the environment in `folder`, creating it if it is missing or incomplete.

    Raises:
        ConfigError: the folder cannot be written to, or the packages cannot be installed.
    """
    contents = repr((sys.version_info[:2], requirements()))
    place = folder / f"trl-{hashlib.sha256(contents.encode()).hexdigest()[:12]}"
    python, stamp = place / "bin" / "python", place / STAMP
    if not stamp.exists():
        say(f"making an environment for TRL in {place} (a few minutes, once): {', '.join(requirements())}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--environment {folder} cannot be written to ({error.strerror}); name a folder that can, with 3 GB of"
                " space"
            ) from None
        shutil.rmtree(place, ignore_errors=True)
        run([sys.executable, "-m", "venv", str(place)])
        run([str(python), "-m", "pip", "install", "--quiet", "--no-input", *requirements()])
        stamp.touch()
    return python


def run(command: Sequence[str]) -> None:
    """Run a command that creates part of the environment.

    Raises:
        ConfigError: the command failed or timed out.
    """
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or getattr(error, "stdout", None) or str(error)
        last = "\n".join(str(said).strip().splitlines()[-5:])
        raise ConfigError(
            f"the environment for TRL cannot be made: {' '.join(command[1:5])} failed\n{last}\nwhere pip does not find"
            " torch, name PyTorch's index in PIP_EXTRA_INDEX_URL; --only hybridengine measures without TRL"
        ) from None
