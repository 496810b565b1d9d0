"""Examines this machine's installation. Needs none of the libraries that it examines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from hybridengine.doctor.findings import Finding
from hybridengine.doctor.judging import (
    Needs,
    Required,
    judge_devices,
    judge_folder,
    judge_memory,
    judge_versions,
)
from hybridengine.doctor.node_facts import FolderFacts, NodeFacts, try_folder

THIS_MACHINE = "this machine"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """What is examined, and for what."""

    folder: str
    """Of all runs."""
    device: str = "auto"
    """As the configuration says: auto, cpu or cuda."""
    pools: tuple[tuple[int, ...], ...] = ()
    """Ranks on each node, of each pool, the actor's first; empty without a configuration."""
    rank_bytes: int = 0
    """Host memory of one rank on a GPU, the copy that a checkpoint is written from included."""
    model_bytes: int = 0
    """What its models take, in the host's memory where there is no GPU."""
    kept_bytes: int = 0
    """Disk space of all checkpoints that stay, and of the one that is being written."""
    checkpoint_bytes: int = 0
    start_limit_s: float = 600.0
    """Until ranks have started."""
    reads: Mapping[str, str] = field(default_factory=dict)
    """Key of the configuration -> file or folder that ranks read, wherever they are."""


def required() -> Required:
    """What this project's metadata asks for."""
    own = metadata.metadata("hybridengine")
    return Required.parse(own["Requires-Python"] or "", metadata.requires("hybridengine") or [])


def examine_machine(wanted: Wanted, own: NodeFacts) -> list[Finding]:
    """This machine by itself; starts nothing."""
    # Of a run on several nodes, nobody knows here how many ranks this one will have.
    ranks = sum(map(sum, wanted.pools)) if all(len(pool) == 1 for pool in wanted.pools) else 0
    on_gpus = wanted.device == "cuda" or (wanted.device == "auto" and bool(own.gpus))
    rank_bytes = wanted.rank_bytes + (0 if on_gpus else wanted.model_bytes)
    needs = Needs({own.node: ranks}, rank_bytes, wanted.kept_bytes, wanted.checkpoint_bytes)
    with made(wanted.folder) as error:
        seen = {own.node: FolderFacts(error=error) if error else try_folder(wanted.folder)}
    return [
        *judge_versions([own], required()),
        *judge_devices([own], wanted.device),
        *judge_memory([own], needs),
        *judge_folder(wanted.folder, seen, {}, {}, needs),
    ]


@contextlib.contextmanager
def made(folder: str) -> Iterator[str]:
    """A folder that is there while the context is open, and only then where it was not before; why it cannot be made."""
    missing = [one for one in (Path(folder), *Path(folder).parents) if not one.exists()]
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        yield f"{type(error).__name__}: {error.strerror}"
        return
    try:
        yield ""
    finally:
        for one in missing:
            with contextlib.suppress(OSError):  # somebody else has put something there
                one.rmdir()
