"""Examination of this machine's installation. Does not need the libraries that it examines."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

from packaging.requirements import Requirement

from hybridengine.doctor.findings import Finding
from hybridengine.doctor.judging import (
    RunNeeds,
    judge_devices,
    judge_folder,
    judge_memory,
    judge_versions,
)
from hybridengine.doctor.node_facts import FolderFacts, NodeFacts, made, try_folder

Say = Callable[[str], None]


def required() -> list[Requirement]:
    """Return the requirements in this project's metadata, including extras."""
    return [Requirement(one) for one in metadata.requires("hybridengine") or []]


def examine_machine(needs: RunNeeds, own: NodeFacts) -> list[Finding]:
    """Examine this machine alone, without starting anything."""
    # The number of ranks on this machine is unknown for a run on several nodes.
    ranks = sum(map(sum, needs.pools)) if all(len(pool) == 1 for pool in needs.pools) else 0
    rank_bytes = needs.rank_bytes(on_gpus=needs.uses_gpus(bool(own.gpus)))
    with made(needs.folder) as error:
        seen = {own.node: FolderFacts(error=error) if error else try_folder(needs.folder)}
    return [
        *judge_versions([own], required()),
        *judge_devices([own], needs),
        *judge_memory([own], {own.node: ranks * rank_bytes}),
        *judge_folder(needs, seen),
    ]
