"""Small checkpoints for tests of their folders."""

from __future__ import annotations

from pathlib import Path

from hybridengine.checkpoints.digests import settled_digests
from hybridengine.checkpoints.folders import (
    Checkpoint,
    RunState,
)
from hybridengine.checkpoints.making import (
    begin_checkpoint,
    complete_checkpoint,
    end_role,
)


def write(run: Path, step: int) -> Checkpoint:
    """Write a checkpoint with one file of a role."""
    return complete_checkpoint(written(run, step))


def written(run: Path, step: int) -> Path:
    """Write a checkpoint that has no name yet, and return its folder."""
    partial = begin_checkpoint(run, RunState(step=step, roles=("actor",), state={"multiplier": 0.1}))
    (partial / "actor" / "weights").write_bytes(bytes(range(256)) * step)
    end_role(partial / "actor", settled_digests(partial / "actor", ["weights"]))
    return partial


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
