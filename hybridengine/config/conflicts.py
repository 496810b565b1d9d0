"""A rule between values that a configuration breaks, and the words that several rules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hybridengine.checkpoint_files import checkpoint_problems
from hybridengine.errors import ConfigError
from hybridengine.model_presets import resolve_model
from hybridengine.model_shapes import ModelShape


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


def described_model(section: str, hf_config: str | None) -> tuple[ModelShape | None, list[Conflict]]:
    """The model that SECTION.hf_config describes, and what is wrong with the description."""
    if hf_config is None:
        return None, []
    try:
        return resolve_model(hf_config), []
    except ConfigError as error:
        return None, [Conflict(f"{section}.hf_config: {error}", (f"{section}.hf_config",))]


def own_checkpoint_conflicts(
    section: str, path: str | None, hf_config: str | None, *, dry_run: bool
) -> Iterator[Conflict]:
    """What is wrong with a model's own checkpoint; where nothing is started, a description stands for it."""
    described, problems = described_model(section, hf_config)
    yield from problems
    if path is None:
        if hf_config is not None:
            yield Conflict(
                f"{section}.hf_config={hf_config} describes the checkpoint {section}.path, which is not given; give it,"
                " or leave hf_config out",
                (f"{section}.hf_config", f"{section}.path"),
            )
        return
    if not (dry_run and described is not None and not Path(path).is_dir()):
        hint = f", or give {section}.hf_config" if dry_run else ""
        yield from checkpoint_conflicts(f"{section}.path", path, hint)


def paths_hint(path: str) -> str:
    """Remedy for a path that does not exist."""
    if Path(path).is_absolute():
        return "name one that exists"
    return f"name one that exists, relative paths start at {Path.cwd()}"
