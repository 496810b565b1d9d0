"""A rule between values that a configuration breaks, and the words that several rules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hybridengine.checkpoint_files import checkpoint_problems


class Conflict(NamedTuple):
    """A rule that a configuration breaks."""

    message: str
    keys: tuple[str, ...]


def checkpoint_conflicts(key: str, path: str, hint: str = "") -> Iterator[Conflict]:
    """What is wrong with the checkpoint that `key` names."""
    if not Path(path).is_dir():
        yield Conflict(f"{key}={path} is not a folder; {paths_hint(path)}{hint}", (key,))
        return
    for problem in checkpoint_problems(path):
        yield Conflict(f"{key}: {problem}", (key,))


def paths_hint(path: str) -> str:
    """Remedy for a path that does not exist."""
    if Path(path).is_absolute():
        return "name one that exists"
    return f"name one that exists, relative paths start at {Path.cwd()}"
